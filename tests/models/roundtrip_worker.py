"""One of four gloo processes that take small models of all architectures through every layout.

Started by `test_roundtrip.py`; rank 0 writes the faults. Only loading and export happen here;
training in such layouts is in `tests/trainer`.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.trainer.export import export
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.world import destroy_world, init_world
from tests.trainer.cases import ODD_VOCABULARY, run_config

RANKS = 4
FOUR = {"num_hidden_layers": 4, "layer_types": None}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
ODD = {"vocab_size": ODD_VOCABULARY}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("tiny_dense", {**FOUR, **GROUPED, **ODD}),
    "qwen3": ("tiny_qwen3", {**FOUR, **GROUPED, "tie_word_embeddings": True}),
    "qwen3_moe": ("tiny_qwen3_moe", {**FOUR, **ODD, "mlp_only_layers": [1]}),
    "llama4": (
        "tiny_scout",
        {**FOUR, "no_rope_layers": [1, 1, 1, 0], "moe_layers": [0, 1, 3]},
    ),
}
"""Name -> (tiny model that it starts from, changes in its config.json)."""
DENSE = ("llama", "qwen3")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BUCKETS = (1, 2**20, 2**40)
"""One tensor, a mebibyte, everything."""
VERSIONS = (1.0, -2.0, 0.5)
"""Each version is the checkpoint times this: exact in every format, another in every element."""


def layouts() -> dict[str, dict[str, int]]:
    """All layouts of four ranks: tensor, pipeline, virtual pipeline, expert, expert tensor."""
    out = {}
    for tp, pp, vpp, ep, etp in itertools.product((1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2)):
        if (vpp > 1 and pp == 1) or RANKS % (pp * ep * etp):
            continue
        out[f"TP{tp} PP{pp} VPP{vpp} EP{ep} ETP{etp}"] = {
            "parallel__tensor": tp,
            "parallel__sequence_parallel": tp > 1,
            "parallel__pipeline": pp,
            "parallel__virtual_pipeline": vpp,
            "parallel__expert": ep,
            "parallel__expert_tensor": etp,
        }
    return out


ALL = ("TP2 PP2 VPP2 EP1 ETP1", "TP2 PP1 VPP1 EP4 ETP1", "TP1 PP2 VPP1 EP2 ETP1")
"""Layouts that take both number formats, and every bucket size through all versions.

Others take bf16, the format of real runs, and each bucket size through one version.
"""


def cases(layout: str) -> list[tuple[str, str]]:
    """Return (model, number format); dense models have no expert ranks to be spread over."""
    options = layouts()[layout]
    experts = options["parallel__expert"] * options["parallel__expert_tensor"]
    models = [name for name in MODELS if experts == 1 or name not in DENSE]
    return list(itertools.product(models, DTYPES if layout in ALL else ("bf16",)))


def faults(
    policy: Policy, loaded: dict[str, Tensor], exports: list[tuple[float, int]]
) -> list[str]:
    """Return the faults of successive exports of (version's factor, bucket size), on rank 0."""
    found = []
    now = 1.0
    for number, (factor, size) in enumerate(exports):
        with torch.no_grad():
            for p in policy.parameters.values():
                p.mul_(factor / now)
        now = factor
        stream = list(export(policy, size))
        if dist.get_rank() != 0:
            continue
        if sorted(name for name, _ in stream) != sorted(loaded):
            found.append(f"export {number}: other names")
        found += [
            f"export {number}: {name}"
            for name, t in stream
            if t.dtype != loaded[name].dtype or not torch.equal(t, loaded[name] * factor)
        ]
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    files = {
        (name, dtype): load_file(folder / dtype / name / "model.safetensors")
        for name in MODELS
        for dtype in DTYPES
    }
    found: dict[str, dict[str, list[str]]] = {}
    for i, (layout, options) in enumerate(layouts().items()):
        run = run_config(folder / "fp32" / "llama", RANKS, **options)
        init_world(run, rank, RANKS, dist.FileStore(str(folder / f"store{i}"), RANKS))
        found[layout] = {}
        exports = list(zip(VERSIONS, BUCKETS, strict=True))
        if layout in ALL:
            exports = list(itertools.product(VERSIONS, BUCKETS))
        for name, dtype in cases(layout):
            directory = folder / dtype / name
            run = run_config(directory, RANKS, precision__params=dtype, **options)
            policy = Policy(run, directory)
            found[layout][f"{name} {dtype}"] = faults(policy, files[name, dtype], exports)
        del policy
        destroy_world()
        gc.collect()
        open_files = len(os.listdir("/proc/self/fd"))
        assert open_files < 60, f"{layout}: {open_files} files are still open"  # a world has 100
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
