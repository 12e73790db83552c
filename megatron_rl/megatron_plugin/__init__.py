"""Reinforcement learning in a Megatron-LM pretraining script, run by `megatron.training.pretrain`.

    from megatron_rl import megatron_plugin

    rl = megatron_plugin.join()                # a generator rank serves here and does not return
    args = parse_and_validate_args(extra_args_provider=rl.arguments(extra_args))
    pretrain(
        pretrain_cfg_container_from_args(args),
        rl.data(datasets_provider),
        ModelType.encoder_or_decoder,
        rl.step(forward_step),
        model_provider=rl.model(model_provider),
    )
    rl.finish()

Started with `--rl-config FILE`, the script trains by reinforcement learning from its Megatron
checkpoint (`--load`); without it every `rl.` above returns its argument, and the script is
unchanged. Megatron's arguments decide the parallel layout, optimizer, number format, checkpoints,
`--train-iters` and `--eval-interval`; the file decides everything else (`megatron-rl config`), and
`--rl-set schedule.prompts_per_step=8` overrides single keys. Its `model` is a Hugging Face
directory with the config and the tokenizer of the same model, for the generators; it needs no
weights.

`torchrun` starts trainers and generators together; the last `roles.generator_ranks` ranks generate.

Steps of a run; Megatron itself is not changed:

    data iterator's next()      publish the weights, ask the orchestrator for the step's batch
    forward_step                loss from the hidden states, through `output_processor`
    finalize_model_grads_func   reduce gradients and divide by nothing; report the step's metrics
    data iterator's save_state  saves the orchestrator's state with Megatron's checkpoint
                                (`--dataloader-save`, which is `--save` by default)
"""

from megatron_rl import compat

compat.install()

from megatron_rl.megatron_plugin.join import PretrainingPlugin as PretrainingPlugin  # noqa: E402
from megatron_rl.megatron_plugin.join import join as join  # noqa: E402
