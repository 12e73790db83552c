"""One of two gloo processes that run the supervised stage in several layouts, and resume it.

Started by `test_sft.py`, which reads the directories that the stage leaves.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trainer.sft_cases import sft_config

RANKS = 2
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2": ("tiny_dense", {"parallel__tensor": 2, "parallel__sequence_parallel": True}),
    "PP2": ("tiny_dense", {"parallel__pipeline": 2}),
    "CP2": ("tiny_dense", {"parallel__context": 2}),
    "DP2": ("tiny_dense", {"schedule__packing": False}),
    "EP2": ("tiny_scout", {"parallel__expert": 2}),
}
RESUMED_FROM = "step_000002"


def main(rank: int, folder: Path) -> None:
    from megatron_rl.train import run_trainer_rank

    torch.set_num_threads(1)

    def run(name: str, **overrides: Any) -> None:
        model, layout = LAYOUTS[name.removesuffix("_resumed")]
        options = {"output_dir": folder / name, **layout, **overrides}
        config = sft_config(folder / f"{model}_tuned", folder / "rows.jsonl", RANKS, **options)
        store = dist.FileStore(str(folder / f"store {name}"), RANKS)
        run_trainer_rank(config, rank, store, reinforce=False)

    for name in LAYOUTS:
        run(name)
        if rank == 0:  # as a crash after the third step leaves it
            again = folder / f"{name}_resumed"
            kept = folder / name / "checkpoints" / RESUMED_FROM
            shutil.copytree(kept, again / "checkpoints" / RESUMED_FROM)
            rows = (folder / name / "sft.jsonl").read_text().splitlines(keepends=True)
            (again / "sft.jsonl").write_text("".join(rows[:3]))
        run(f"{name}_resumed", resume=True)
