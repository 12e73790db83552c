"""Reinforcement learning in a Megatron-LM pretraining script, run by `megatron.training.pretrain`.

    from megatron_rl import megatron_plugin

    rl = megatron_plugin.join()                # a generator rank serves here and does not return
    args = parse_and_validate_args(extra_args_provider=rl.arguments(extra_args))
    pretrain(
        pretrain_cfg_container_from_args(args, rl.model(gpt_config_from_args(args))),
        rl.data(train_valid_test_datasets_provider),
        ModelType.encoder_or_decoder,
        rl.step(forward_step),
    )
    rl.finish()

Without `--rl-config FILE` every `rl.` above returns its argument, and the script is unchanged. A
step, on every trainer rank; no file of Megatron is changed:

    before the schedule         publish the weights, ask the orchestrator for the step's batch
    forward_step                loss from the hidden states, through `output_processor`
    finalize_model_grads_func   reduce gradients and divide by nothing; report the step's metrics;
                                at the first one, compare the model with the generators'
    data iterator's save_state  saves the orchestrator's state with Megatron's checkpoint
                                (`--dataloader-save`, which is `--save` by default)
"""

from megatron_rl import compat

compat.install()

from megatron_rl.megatron_plugin.join import PretrainingPlugin as PretrainingPlugin  # noqa: E402
from megatron_rl.megatron_plugin.join import join as join  # noqa: E402
