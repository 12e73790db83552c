"""The checks of gpu_checks.py under pytest: `pytest -m gpu tests/kernels`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kernels.gpu_checks import CHECKS


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_gpu(check: Callable[[], None]) -> None:
    check()
