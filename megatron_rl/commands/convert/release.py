"""Give memory back between pieces, so that a process is as large as a piece needs."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable


def release() -> None:
    """Frees what pieces before left: torch.save keeps its tensor in a reference cycle, and glibc
    keeps freed blocks of some megabytes for later ones that may be larger."""
    gc.collect(1)
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; other C libraries give blocks of this size back at once, or not at all."""
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
