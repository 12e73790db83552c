"""One parametrized fixture forces each kind of CPU products that the processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_rl.kernels import heads, library


@pytest.fixture(scope="module", params=library.load().cpu_kernels)
def cpu_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force a kind by `MEGATRON_RL_CPU_KERNEL`, in started processes as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_RL_CPU_KERNEL", request.param)
        heads.select.cache_clear()
        yield request.param
    heads.select.cache_clear()
