"""One of three gloo processes that take a pretrained model through Megatron, alone and split.

Started by `test_pretrained.py` in a folder with the model (`hf`) and its conversion (`megatron`);
rank 0 writes what it saw. Its nine heads and three key-value heads leave tensor parallelism of one
and of three.
"""

from __future__ import annotations

import filecmp
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.models.packing import Rows
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.export import export
from megatron_rl.trainer.hf_checkpoint import COPIED, save_huggingface
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.world import destroy_world, init_world
from tests.trainer.cases import run_config

RANKS = 3
LAYOUTS = {"TP1": 1, "TP3": 3, "TP3 SP": 3}
"""Name -> ranks."""
SAVED = ("TP1", "TP3")
"""Layouts that load the conversion as well, and write a Hugging Face directory."""
MULTIPLE = 3
"""Of the positions of a row, which sequence parallelism divides."""


def row(folder: Path) -> tuple[Tensor, tuple[int, ...]]:
    """Return the packed prompts [1, S] and their bounds; the last one is cut to fit `MULTIPLE`."""
    prompts: list[list[int]] = json.loads((folder / "prompts.json").read_text())
    if spare := sum(map(len, prompts)) % MULTIPLE:
        prompts[-1] = prompts[-1][:-spare]
    bounds = torch.tensor([0, *map(len, prompts)]).cumsum(0).tolist()
    return torch.tensor([[*itertools.chain(*prompts)]]), tuple(bounds)


def reference(folder: Path) -> list[Tensor]:
    """Return the logits [T, V] of transformers, prompt by prompt."""
    from transformers import AutoModelForCausalLM

    tokens_1S, bounds = row(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return [model(tokens_1S[:, a:b]).logits[0] for a, b in itertools.pairwise(bounds)]


@torch.no_grad()
def logits_of(policy: Policy, folder: Path) -> list[Tensor]:
    """Return the model's logits [T, V] of each prompt of the packed row; collective."""
    tokens_1S, bounds = row(folder)
    rows = Rows.of_bounds(bounds, 0, 1, tokens_1S.device)
    mine = policy.modules[0](tokens_1S, rows.positions_s[None], None, packed_seq_params=rows)
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine.contiguous(), group=group)
    whole_SV = torch.cat(parts, dim=-1)[0]
    return [whole_SV[a:b] for a, b in itertools.pairwise(bounds)]


def relative_error(ours_TV: Tensor, theirs_TV: Tensor) -> float:
    """Return the largest difference of a position's logits by the largest of them."""
    largest_T = theirs_TV.abs().amax(-1)
    return float(((ours_TV - theirs_TV).abs().amax(-1) / largest_T).max())


def differing(policy: Policy, source: dict[str, Tensor]) -> list[str]:
    """Return the names that the export lacks, adds or has other bits in, on rank 0; collective."""
    stream = export(policy)
    if dist.get_rank():
        return []
    same = {name: name in source and is_same(tensor, source[name]) for name, tensor in stream}
    return sorted(n for n in source.keys() | same.keys() if not same.get(n))


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits, those of zeros and of NaN included."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def model_files(*directories: Path) -> set[str]:
    """Return the names of what is a model's in any of these directories; notes are not."""
    names = {path.name for directory in directories for path in directory.iterdir()}
    return {name for name in names if name in COPIED or "safetensors" in name}


def other_files(policy: Policy, folder: Path) -> list[str]:
    """Load the conversion, save the model, and return the files that differ; collective."""
    with torch.no_grad():
        for p in policy.parameters.values():
            p.zero_()
    checkpoint.load_weights(policy, folder / "megatron" / "release")
    saved, source = folder / "saved", folder / "hf"
    save_huggingface(policy, saved, source)
    if dist.get_rank():
        return []
    _, *others = filecmp.cmpfiles(source, saved, model_files(source, saved), shallow=False)
    shutil.rmtree(saved)
    return sorted(itertools.chain(*others))


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    theirs = reference(folder) if rank == 0 else []
    source = load_file(folder / "hf" / "model.safetensors") if rank == 0 else {}
    seen: dict[str, dict[str, Any]] = {}
    for i, (layout, ranks) in enumerate(LAYOUTS.items()):
        if rank >= ranks:
            continue
        options = {"parallel__tensor": ranks, "parallel__sequence_parallel": "SP" in layout}
        run = run_config(folder / "hf", ranks, **options)
        init_world(run, rank, ranks, dist.FileStore(str(folder / f"store{i}"), ranks))
        policy = Policy(run, folder / "hf")
        ours = logits_of(policy, folder)
        seen[layout] = {
            "errors": [relative_error(*pair) for pair in zip(ours, theirs, strict=False)],
            "tensors": differing(policy, source),
            "files": other_files(policy, folder) if layout in SAVED else [],
        }
        del policy
        destroy_world()
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(seen))
