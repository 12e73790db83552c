"""Tools that fail, each in its way."""

from __future__ import annotations

import os
import time


def raises(key: str) -> str:
    """Raise.

    Args:
        key: A key.
    """
    raise OSError(f"the service of {key} is down")


def hangs(key: str) -> str:
    """Hang, also in the way of an interrupt.

    Args:
        key: A key.
    """
    while True:
        time.sleep(60)


def dies(key: str) -> str:
    """Die with the process.

    Args:
        key: A key.
    """
    os._exit(3)


def floods(key: str) -> str:
    """Return more than anyone reads.

    Args:
        key: A key.
    """
    print("x" * 10**7)
    return "1" * 10**6


def nothing(key):
    return key
