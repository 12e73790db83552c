"""The trainer: a Hugging Face model on Megatron-Core, trained by sums of weighted token losses.

All of it is SPMD: every rank of the Megatron world makes the same calls in the same order.

    from megatron_rl.trainer.world import init_world, destroy_world
    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.trainer import Trainer
    from megatron_rl.trainer.sft import run_supervised, save_huggingface
    from megatron_rl.trainer.loop import run_trainer

    init_world(config, rank, world_size, store)         # rank, world_size of the trainer ranks
    policy = Policy(config, "path/to/huggingface")      # loads the weights
    run_supervised(config, policy, examples_by_step, on_step)   # optional
    save_huggingface(policy, "path/to/start", source="path/to/huggingface")
    run_trainer(config, policy, client, publish=publisher, start_step=0,
                stop_requested=lambda: False)           # client, publish: rank 0 only
    destroy_world()

Importing this package lets Megatron-Core run on CPU where there is no CUDA (`compat`), so it must
come before the first import of `megatron.core`. It imports neither orchestrator nor rollout.
"""

from megatron_rl import compat
from megatron_rl.compat import quiet

compat.install()
quiet.silence_notices()
