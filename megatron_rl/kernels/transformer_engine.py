"""Find Transformer Engine, and refuse one that is installed and cannot be used."""

import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def general_gemm() -> Callable[..., Any] | None:
    """Return Transformer Engine's matrix product; None without a GPU or without the package.

    Raises:
        RuntimeError: the package is installed and does not load, or is older than 2.10.
    """
    if not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None:
        return None
    try:
        import transformer_engine.pytorch
        from transformer_engine.pytorch.cpp_extensions import general_gemm
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise RuntimeError(
            f"Transformer Engine is installed and does not load ({type(error).__name__}: {error})."
            f" It may have been built for another torch than {torch.__version__} (CUDA"
            f" {torch.version.cuda}): reinstall it with `pip install --no-build-isolation"
            " --no-cache-dir --force-reinstall --no-deps transformer-engine-torch`, or remove it"
            " with `pip uninstall transformer-engine transformer-engine-torch` to train with"
            " Megatron's local layers"
        ) from error
    if "workspace" in inspect.signature(general_gemm).parameters:
        raise RuntimeError(
            f"Transformer Engine {transformer_engine.__version__} is installed: its general_gemm"
            " takes a workspace, as before 2.10; install transformer-engine[pytorch]>=2.10 with"
            " --no-build-isolation, or remove it"
        )
    gemm: Callable[..., Any] = general_gemm
    return gemm
