"""Settings of all tests: no network, one thread per process, GPU tests skipped where none is."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Read by libraries at import, so they are set before any test module is.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_MODE": "offline",
    "MPLBACKEND": "agg",
}.items():
    os.environ.setdefault(name, value)

# Deadlines measure the machine, not the code: other processes share these cores.
settings.register_profile(
    "shared", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests, with the reason, where torch finds no CUDA device."""
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if not on_gpu:
        return
    import torch

    if torch.cuda.is_available():
        return
    reason = f"needs a CUDA device: torch {torch.__version__} finds none"
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason=reason))
