"""Origins of the tokens of a completion, for tests."""

from __future__ import annotations

from megatron_rl.messages import Segment


def segments(tokens: int, forced: tuple[int, int] = (0, 0)) -> list[Segment]:
    """Return those of a single turn with a range of forced tokens."""
    first, end = forced if forced[1] else (tokens, tokens)
    parts = [("sampled", 0, first), ("forced", first, end), ("sampled", end, tokens)]
    return [Segment(kind, start, stop) for kind, start, stop in parts if start < stop]
