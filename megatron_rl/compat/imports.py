"""Imports of torch, Megatron and vLLM with few garbage collections: a fifth of their CPU time."""

import gc

_USUAL = gc.get_threshold()
_RARE = (50_000, 50, 1000)


def collect_rarely() -> None:
    """Begin the imports: what they make stays, and every collection would look at all of it."""
    gc.set_threshold(*_RARE)


def collect_as_usual() -> None:
    """End the imports: later collections leave out what is there now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL)
