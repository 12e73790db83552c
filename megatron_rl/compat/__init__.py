"""Run-time changes of upstream packages; each states why, and for which releases.

Megatron is changed while it is imported, so every package here that imports it calls `install`
in its `__init__`: no order of imports has to be kept.
"""

import gc
from functools import cache

from megatron_rl.compat import megatron_cpu, megatron_fixes, running_code, upstream
from megatron_rl.compat.import_hook import after_import

_USUAL = gc.get_threshold()
_RARE = (50_000, 50, 1000)


def install() -> None:
    """Have Megatron changed while it is imported; imports nothing heavy, safe to repeat.

    Raises:
        RuntimeError: `megatron.core` was imported before, on a machine without CUDA.
    """
    megatron_cpu.install()
    upstream.install(megatron_fixes.FIXES)
    after_import(running_code.ANNOUNCED, running_code.announce)


def collect_rarely() -> None:
    """Begin the imports of torch, Megatron and vLLM: a fifth of their CPU time is collections."""
    gc.set_threshold(*_RARE)


@cache
def collect_as_usual() -> None:
    """End the imports: later collections leave out what is there now; safe to repeat."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL)
