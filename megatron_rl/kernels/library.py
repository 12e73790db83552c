"""Load the compiled operators, or register their torch reference in their place.

After `load()` the operators are `torch.ops.megatron_rl.*` in both cases. Two variables choose:

    MEGATRON_RL_KERNELS      unset: find or build the library; `reference`: plain torch; else a path
    MEGATRON_RL_CPU_KERNEL   one of `CPU_KERNELS`: the bf16 products on CPU; unset: the fastest one

A machine without a compiler gets the reference, and one log line with the reason.
"""

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron_rl.kernels import build, cispo_reference

log = logging.getLogger(__name__)

_SHARD = "Tensor targets, int first, int columns, float scale"
_CISPO = "Tensor generator_logprobs, Tensor advantages, Tensor weights, float max_ratio"
_GRADS = "Tensor top, Tensor mass, Tensor coefficients, bool bf16"
SCHEMAS = {
    "row_stats": f"(Tensor logits, {_SHARD}) -> Tensor",
    "row_grads_": f"(Tensor(a!) logits, {_SHARD}, {_GRADS}) -> ()",
    "cispo_rows_": f"(Tensor(a!) logits, {_SHARD}, {_CISPO}, bool bf16) -> Tensor",
    "merge_rows": "(Tensor stats, float scale) -> Tensor",
    "cispo_terms": f"(Tensor logprobs, {_CISPO}) -> Tensor",
}
"""Row operators; `csrc/library.cpp` registers the same ones."""
GEMMS = ("bf16_logits_", "bf16_hidden_grad_", "bf16_weight_grad_")
"""bf16 -> fp32 products on CPU; in the compiled library only."""
CPU_KERNELS = ("generic", "avx512_bf16", "amx")
"""Kinds of bf16 products on CPU, in the order of `csrc/gemm_bf16.h`: fp32 upcasts in torch,
vdpbf16ps, tdpbf16ps."""


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """The operators of this process.

    Without a `path` they are the torch reference. `cpu_kernels` are the kinds of `CPU_KERNELS` that
    this processor runs, `cpu_kernel` the fastest of them; `cuda`: CUDA kernels are compiled in.
    """

    path: Path | None
    cuda: bool
    cpu_kernels: tuple[str, ...]
    cpu_kernel: str


REFERENCE = KernelLibrary(None, False, ("generic",), "generic")


def _open(path: Path) -> KernelLibrary:
    torch.ops.load_library(str(path))
    handle = ctypes.CDLL(str(path))
    kinds = tuple(k for i, k in enumerate(CPU_KERNELS) if handle.megatron_rl_can_run_gemm(i))
    best = CPU_KERNELS[handle.megatron_rl_best_gemm()]
    return KernelLibrary(path, bool(handle.megatron_rl_has_cuda()), kinds, best)


def _register_reference(kind: str, *devices: str) -> None:
    library = torch.library.Library("megatron_rl", kind)
    for name, schema in SCHEMAS.items():
        if kind == "DEF":
            library.define(name + schema)
        for device in devices:
            library.impl(name, getattr(cispo_reference, name), device)
    _held.append(library)


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
def load() -> KernelLibrary:
    """Make `torch.ops.megatron_rl.*` exist, once per process.

    Raises:
        OSError: `MEGATRON_RL_KERNELS` names a file that can't be loaded.
        ValueError: `MEGATRON_RL_CPU_KERNEL` names a kind that doesn't exist or can't run here.
    """
    cuda = torch.cuda.is_available()
    chosen = os.environ.get("MEGATRON_RL_KERNELS")
    reason = "MEGATRON_RL_KERNELS=reference"
    if chosen != "reference":
        try:
            path = Path(chosen) if chosen is not None else build.find_or_build(cuda=cuda)
        except build.BuildError as error:
            reason = str(error)
        else:
            library = _open(path)
            cpu_kernel(library)
            if cuda and not library.cuda:
                log.warning("%s holds no CUDA code: rows on GPU run in plain torch", path)
                _register_reference("IMPL", "CUDA")
            _register_fakes(gemms=True)
            return library
    cpu_kernel(REFERENCE)
    log.warning("kernels run as their plain torch reference: %s", reason)
    _register_reference("DEF", "CPU", "CUDA")
    _register_fakes(gemms=False)
    return REFERENCE


def cpu_kernel(library: KernelLibrary) -> str:
    """Return the kind of bf16 products on CPU: `MEGATRON_RL_CPU_KERNEL`, else the fastest.

    Raises:
        ValueError: the variable names a kind that doesn't exist or that can't run here.
    """
    kind = os.environ.get("MEGATRON_RL_CPU_KERNEL")
    if not kind:
        return library.cpu_kernel
    if kind not in CPU_KERNELS:
        raise ValueError(
            f"MEGATRON_RL_CPU_KERNEL is {kind!r}: the kinds are {', '.join(CPU_KERNELS)}"
        )
    if kind not in library.cpu_kernels:
        runner = "this processor" if library.path else "the torch reference (no compiled library)"
        raise ValueError(
            f"MEGATRON_RL_CPU_KERNEL is {kind!r}: {runner} runs {', '.join(library.cpu_kernels)}"
            " only; unset it or choose one of these"
        )
    return kind
