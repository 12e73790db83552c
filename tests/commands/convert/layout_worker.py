"""One of two gloo processes that load converted checkpoints into parallel layouts, and save them.

Started by `test_layouts.py` in a folder that contains the models (`<name>`), models of the same
shapes with other weights (`<name>.other`), and the converted ones (`<name>.megatron`). Rank 0
writes `results.pt`: for each layout, whether the loaded weights equal the model's, and the path of
the checkpoint that this layout saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trainer.cases import run_config, save_checkpoint

TP = {"parallel__tensor": 2}
SP = {**TP, "parallel__sequence_parallel": True}
EP = {"parallel__expert": 2}
BF16 = {"precision__params": "bf16"}

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense TP2": ("tiny_dense", TP),
    "dense PP2": ("tiny_dense", {"parallel__pipeline": 2}),
    "dense DP2 bf16": ("tiny_dense_bf16", BF16),
    "scout EP2": ("tiny_scout", EP),
    "scout TP2 SP ETP2": ("tiny_scout", {**SP, "parallel__expert_tensor": 2}),
    "scout TP2 SP EP2 bf16": ("tiny_scout_bf16", {**SP, **EP, **BF16}),
    "scout PP2": ("tiny_scout", {"parallel__pipeline": 2}),
    "qwen3 TP2": ("tiny_qwen3", TP),
    "qwen3 moe EP2": ("tiny_qwen3_moe", EP),
}


def load_and_save(config: Any, folder: Path, name: str) -> dict[str, Any]:
    """Load a converted checkpoint into a layout and save it; return the result on rank 0."""
    from safetensors.torch import load_file

    from megatron_rl.trainer import checkpoint
    from megatron_rl.trainer.export import export
    from megatron_rl.trainer.model import Policy

    policy = Policy(config, folder / f"{name}.other")
    checkpoint.load_weights(policy, folder / f"{name}.megatron" / "release")
    weights = dict(export(policy))
    saved = save_checkpoint(config, policy, 1)
    # The optimizer's own copy of the parameters must be the loaded one as well.
    policy.apply(0.0)
    after = dict(export(policy))
    if dist.get_rank():
        return {}
    expected = load_file(folder / name / "model.safetensors")
    equal = weights.keys() == expected.keys() and all(
        torch.equal(weights[n], expected[n]) and torch.equal(after[n], expected[n])
        for n in expected
    )
    return {"equal": equal, "saved": str(saved)}


def main(rank: int, folder: Path) -> None:
    from megatron_rl.trainer.world import destroy_world, init_world

    torch.set_num_threads(1)
    results = {}
    for i, (layout, (name, options)) in enumerate(LAYOUTS.items()):
        config = run_config(folder / name, 2, output_dir=folder / "out" / str(i), **options)
        init_world(config, rank, 2, dist.FileStore(str(folder / f"store{i}"), 2))
        results[layout] = load_and_save(config, folder, name)
        destroy_world()
    if rank == 0:
        torch.save(results, folder / "results.pt")
