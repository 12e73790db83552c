"""Transformer Engine's layers against Megatron's local ones on one device, model by model.

    python benchmarks/te_layouts.py --out te_layouts.md

Each case takes one gradient of a tiny model in bf16 and compares log-probs and gradients with those
of the local layers in fp32. Rounding to bf16 moves both kinds of layers; those of Transformer
Engine may be `FACTOR` times as far from fp32 as the local ones. Routes of experts are given: a
rounding that chooses another expert is no error of a layer. Without Transformer Engine, or without
a GPU, the local layers are measured alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from tests.trainer.cases import (
    batch,
    distances,
    gradients,
    run_config,
    with_random_routes,
    world_of_one,
    write_model,
)

FACTOR, FLOOR = 4.0, 1e-3
CHUNKED = {"attention_chunk_size": 5, "floor_scale": 3, "attn_scale": 0.3}
REPLAY = {"algorithm__routing_replay": "replay"}
PADDED = {"schedule__packing": False}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense, packed": ("tiny_dense", {}, {}),
    "dense, padded": ("tiny_dense", {}, PADDED),
    "dense, tied": ("tiny_dense", {"tie_word_embeddings": True}, {}),
    "dense, full recomputation": ("tiny_dense", {}, {"parallel__recompute": "full"}),
    "qwen3, packed": ("tiny_qwen3", {}, {}),
    "qwen3 experts, selective recomputation": (
        "tiny_qwen3_moe",
        {},
        {**REPLAY, "parallel__recompute": "selective"},
    ),
    "scout, packed": ("tiny_scout", {}, REPLAY),
    "scout, chunked attention": ("tiny_scout", CHUNKED, REPLAY),
    "scout, chunked attention, padded": ("tiny_scout", CHUNKED, {**REPLAY, **PADDED}),
}
"""Case -> (tiny model, changes of its config.json, settings of the run)."""


@dataclass
class Gradient:
    """Log-probs and gradients of one step."""

    logprobs: Tensor
    by_name: dict[str, Tensor] = field(default_factory=dict)

    def error(self, exact: Gradient) -> tuple[float, float]:
        """Return the largest difference of a log-prob, and the largest relative one of a tensor."""
        apart = float((self.logprobs - exact.logprobs).abs().max())
        return apart, max(distances(self.by_name, exact.by_name).values())


def reason_without_te() -> str:
    """Return why Transformer Engine is left out, or an empty text."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if importlib.util.find_spec("transformer_engine") is None:
        return "not installed"
    return ""


def gradient(directory: Path, settings: dict[str, Any], params: str, use_te: bool) -> Gradient:
    """Take one gradient in a world of this process alone."""
    config = run_config(directory, precision__params=params, **settings)
    with world_of_one(config):
        from megatron_rl.trainer import megatron_build
        from megatron_rl.trainer.model import Policy
        from megatron_rl.trainer.step import Trainer

        with patch.object(megatron_build, "transformer_engine", lambda: use_te):
            policy = Policy(config, directory)
        seen: dict[str, Tensor] = {}

        def observed(learning_rate: float) -> float:
            seen.update((n, g.float().cpu()) for n, g in gradients(policy).items())
            return 0.0

        policy.apply = observed  # type: ignore[method-assign]
        message = batch()
        if policy.routing is not None:
            message = with_random_routes(message, policy.architecture)
        done = Trainer(config, policy).train_step(message, 0)
        logprobs = torch.tensor([x for row in done.probe_logprobs for x in row])
    return Gradient(logprobs, seen)


def main() -> None:
    """Compare all cases; exit status 1 if one is too far away or fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    a = parser.parse_args()
    reason, failed = reason_without_te(), []
    lines = ["| case | local bf16: log-prob | gradient | TE bf16: log-prob | gradient | |"]
    lines.append("|---|--:|--:|--:|--:|---|")
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(a.case or CASES):
            model, changes, settings = CASES[case]
            directory = write_model(Path(folder) / str(number), model, **changes)
            exact = gradient(directory, settings, "fp32", False)
            local = gradient(directory, settings, "bf16", False).error(exact)
            te, verdict = ("", ""), "local layers alone"
            if not reason:
                try:
                    errors = gradient(directory, settings, "bf16", True).error(exact)
                    close = all(e <= FACTOR * x + FLOOR for e, x in zip(errors, local, strict=True))
                    te, verdict = tuple(f"{e:.1e}" for e in errors), "ok" if close else "TOO FAR"
                except Exception as error:  # noqa: BLE001 - the other cases still run
                    close, verdict = False, f"FAILED: {type(error).__name__}: {error}"[:200]
                if not close:
                    failed.append(case)
            cells = (case, *(f"{e:.1e}" for e in local), *te, verdict)
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if a.out:
        a.out.write_text("\n".join(lines) + "\n")
    left_out = f"; Transformer Engine left out: {reason}" if reason else ""
    print(f"{len(a.case or CASES)} cases, {len(failed)} failed{left_out}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
