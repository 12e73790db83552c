"""What this package itself has to say while a run starts, on the terminal."""

from __future__ import annotations

import logging
import sys


def show_own_notices() -> None:
    """Print the INFO lines of `megatron_rl.*`, as they are; safe to repeat."""
    logger = logging.getLogger("megatron_rl")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
