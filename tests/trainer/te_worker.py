"""Two processes of `test_transformer_engine.py`: one release of Transformer Engine each.

Each trains the same batches through Megatron's local layers and through those of Transformer
Engine, on stand-ins, and writes what differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import te_stand_in

CHUNKED = {"attention_chunk_size": 5, "floor_scale": 3, "attn_scale": 0.3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("tiny_dense", {}),
    "deep dense": ("tiny_dense", {"num_hidden_layers": 6}),
    "tied qwen3": ("tiny_qwen3", {"tie_word_embeddings": True}),
    "qwen3 moe": ("tiny_qwen3_moe", {}),
    "chunked scout": ("tiny_scout", CHUNKED),
}
SINGLE = {"schedule__micro_batch_tokens": 1}
PADDED = {"schedule__packing": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "dense, rows of one sequence": ("dense", SINGLE),
    "dense, padded": ("dense", PADDED),
    "deep dense": ("deep dense", {}),
    "tied qwen3": ("tied qwen3", {}),
    "qwen3 moe": ("qwen3 moe", {}),
    "qwen3 moe, recomputed": ("qwen3 moe", {"parallel__recompute": "full"}),
    "chunked scout": ("chunked scout", {}),
    "chunked scout, padded": ("chunked scout", PADDED),
}


class Reads(TorchDispatchMode):
    """Counts the values that the host reads from a tensor, where a GPU would be waited for."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def observe(directory: Path, options: dict[str, Any], use_te: bool) -> dict[str, Any]:
    """Return log-probs and gradients of two passes over a batch; the second is compared."""
    from megatron_rl.models import packing
    from megatron_rl.trainer import megatron_build
    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.step import Trainer
    from tests.trainer.cases import batch, gradients, run_config, world_of_one

    copied, copies = packing._copied, 0

    def counted(*args: Any) -> Any:
        nonlocal copies
        copies += 1
        return copied(*args)

    megatron_build.transformer_engine = lambda: use_te
    packing._copied = counted
    te_stand_in.attended.clear()
    te_stand_in.calls.clear()
    config = run_config(directory, **options)
    with world_of_one(config):
        policy = Policy(config, directory)
        micro_batches, objective = Trainer(config, policy).prepare(batch(sequences=9), 0)
        for _ in range(2):
            copies = 0
            with Reads() as reads:
                policy.forward_backward(micro_batches, objective)
        return {
            "logprobs": torch.cat([m.logprobs_T for m in micro_batches]),
            "gradients": gradients(policy),
            "names": sorted(policy.parameters),
            "micro-batches": len(micro_batches),
            "copies": copies,
            "reads": reads.count,
            "attended": list(te_stand_in.attended),
            "calls": set(te_stand_in.calls),
        }


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    te_stand_in.install((te_stand_in.OLD, te_stand_in.NEW)[rank])
    seen = {
        name: [observe(folder / model, options, use_te) for use_te in (False, True)]
        for name, (model, options) in CASES.items()
    }
    torch.save(seen, folder / f"seen{rank}.pt")
