"""Loads the compiled operators, or registers their torch reference in their place.

After `load()` the operators are `torch.ops.megatron_rl.*`, whichever it was. `MEGATRON_RL_KERNELS`
chooses: unset finds or builds the library, `reference` takes plain torch, a path takes that file.
A machine without a compiler gets the reference, which the log names once.
"""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron_rl.kernels import build, reference

log = logging.getLogger(__name__)

SCHEMAS = {
    "row_stats": "(Tensor logits, Tensor targets, int first, int columns, float scale) -> Tensor",
    "row_grads_": (
        "(Tensor(a!) logits, Tensor targets, int first, int columns, float scale, Tensor top,"
        " Tensor mass, Tensor coefficients, bool bf16) -> ()"
    ),
    "cispo_rows_": (
        "(Tensor(a!) logits, Tensor targets, int first, int columns, float scale,"
        " Tensor generator_logprobs, Tensor advantages, Tensor weights, float max_ratio,"
        " bool bf16) -> Tensor"
    ),
    "merge_rows": "(Tensor stats, float scale) -> Tensor",
    "cispo_terms": (
        "(Tensor logprobs, Tensor generator_logprobs, Tensor advantages, Tensor weights,"
        " float max_ratio) -> Tensor"
    ),
}
"""Row operators; `csrc/library.cpp` registers the same ones."""
GEMMS = ("bf16_logits_", "bf16_hidden_grad_", "bf16_weight_grad_")
"""bf16 -> fp32 products on CPU; in the compiled library only."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the operators are on this machine."""

    path: Path | None
    """The library; None: the torch reference."""
    cuda: bool
    """CUDA kernels are compiled in."""
    cpu_gemm: int
    """Kind of bf16 GEMM that is fastest on this processor: 0 none, 1 AVX-512, 2 AMX."""

    def can_run(self, cpu_gemm: int) -> bool:
        """Whether this processor runs a kind of bf16 GEMM."""
        if self.path is None:
            return cpu_gemm == 0
        return bool(ctypes.CDLL(str(self.path)).megatron_rl_can_run_gemm(cpu_gemm))


def _find(cuda: bool) -> Path:
    chosen = os.environ.get("MEGATRON_RL_KERNELS")
    if chosen is not None:
        return Path(chosen)
    return build.find_or_build(cuda=cuda)


def _define_reference(library: torch.library.Library, key: str, *, define: bool) -> None:
    for name, schema in SCHEMAS.items():
        if define:
            library.define(name + schema)
        library.impl(name, getattr(reference, name), key)


def _register_fakes(gemms: bool) -> None:
    def rows(k: int) -> Any:
        return lambda logits, *_: logits.new_empty(k, logits.shape[0])

    register = torch.library.register_fake
    register("megatron_rl::row_stats", rows(4))
    register("megatron_rl::cispo_rows_", rows(5))
    register("megatron_rl::cispo_terms", rows(3))
    register("megatron_rl::merge_rows", lambda stats, scale: stats.new_empty(stats.shape[1:]))
    for name in ("row_grads_", *(GEMMS if gemms else ())):
        register(f"megatron_rl::{name}", lambda *_: None)


_held: list[torch.library.Library] = []


@cache
def load() -> Kernels:
    """Makes `torch.ops.megatron_rl.*` exist, once per process.

    Raises:
        OSError: `MEGATRON_RL_KERNELS` names a file that can't be loaded.
    """
    cuda = torch.cuda.is_available()
    reason = "MEGATRON_RL_KERNELS=reference"
    if os.environ.get("MEGATRON_RL_KERNELS") != "reference":
        try:
            path = _find(cuda)
        except build.BuildError as error:
            reason = str(error)
        else:
            torch.ops.load_library(str(path))
            handle = ctypes.CDLL(str(path))
            found = Kernels(
                path, bool(handle.megatron_rl_has_cuda()), handle.megatron_rl_best_gemm()
            )
            if cuda and not found.cuda:
                log.warning("%s holds no CUDA code: rows on GPU run in plain torch", path)
                _held.append(torch.library.Library("megatron_rl", "IMPL"))
                _define_reference(_held[-1], "CUDA", define=False)
            _register_fakes(gemms=True)
            return found
    log.warning("kernels run as their plain torch reference: %s", reason)
    _held.append(torch.library.Library("megatron_rl", "DEF"))
    _define_reference(_held[-1], "CPU", define=True)
    _define_reference(_held[-1], "CUDA", define=False)
    _register_fakes(gemms=False)
    return Kernels(None, False, 0)
