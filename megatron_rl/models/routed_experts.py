"""Which experts each token took: as an array, and as the bytes of a message.

Shape legend: N tokens, L layers with experts (ascending), K experts of a token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_rl.models.base import Architecture

UNKNOWN = -1
"""Stands for every expert of a token whose choice nobody has seen."""

Routes = NDArray[np.int16]
"""[N, L, K]: global expert numbers."""


def check_experts(architecture: Architecture, mode: str) -> None:
    """Refuses `algorithm.routing_replay` = `mode` for a dense model.

    Raises:
        ValueError: with the remedy.
    """
    if mode != "none" and not architecture.moe_layers:
        raise ValueError(
            f"algorithm.routing_replay is {mode!r}: the model has no experts; set it to 'none'"
        )


def encode(routes_NLK: Routes, experts: int) -> bytes:
    """The bytes of `messages.Sample.routes`: one per choice, two beyond 255 experts.

    Args:
        routes_NLK: choices; `UNKNOWN` is written as the largest number.
        experts: routed experts of a layer.
    """
    kind = _dtype(experts)
    known_NLK = np.where(routes_NLK == UNKNOWN, np.iinfo(kind).max, routes_NLK)
    return known_NLK.astype(kind).tobytes()


def decode(data: bytes, tokens: int, architecture: Architecture) -> Routes:
    """The choices of so many tokens.

    Raises:
        ValueError: bytes of another size, or an expert that the model does not have; both come of
            a generator with another model.
    """
    layers, per_token = len(architecture.moe_layers), architecture.experts_per_token
    kind = _dtype(architecture.experts)
    expected = tokens * layers * per_token * kind.itemsize
    if len(data) != expected:
        raise ValueError(
            f"{len(data)} bytes of routes for {tokens} tokens: {layers} layers with {per_token}"
            f" experts per token need {expected}; generator and trainer have different models"
        )
    written = np.frombuffer(data, dtype=kind)
    unknown = written == np.iinfo(kind).max
    largest = written.max(initial=0, where=~unknown)
    if largest >= architecture.experts:
        raise ValueError(
            f"routes name expert {largest}: the model has {architecture.experts};"
            " generator and trainer have different models"
        )
    flat = written.astype(np.int16)
    flat[unknown] = UNKNOWN
    return flat.reshape(tokens, layers, per_token)


def _dtype(experts: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("u1" if experts <= np.iinfo("u1").max else "<u2")
