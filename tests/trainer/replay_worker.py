"""One of two ranks that replay a recorded run in other layouts than its own (`test_replay.py`)."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

LAYOUTS = {
    "TP2": ["--parallel.tensor", "2", "--parallel.sequence_parallel"],
    "EP2": ["--parallel.expert", "2"],
}


def main(rank: int, folder: Path) -> None:
    from megatron_rl import train
    from megatron_rl.orchestrator.replay import plan_replay
    from megatron_rl.trainer.world import destroy_world, init_world

    torch.set_num_threads(1)
    for name, options in LAYOUTS.items():
        own = ["--output_dir", str(folder / name), "--roles.trainer_ranks", "2", *options]
        plan = plan_replay(folder / "run", None, own)
        init_world(plan.config, rank, 2, dist.FileStore(str(folder / f"{name}.store"), 2))
        train._replay(plan, rank, Path(plan.config.model), lambda: False)
        destroy_world()
