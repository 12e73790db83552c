"""The routed experts of each token: as an array, and as the bytes of a message.

Shape legend: N tokens, L layers with experts (ascending), K experts of a token.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_rl.models.base import Architecture

UNKNOWN = -1  # replaces every expert of a token whose experts were not captured

RoutedExperts = NDArray[np.int16]  # [N, L, K]: global expert numbers


def check_experts(architecture: Architecture, mode: str) -> None:
    """Raise ValueError if `algorithm.routing_replay` = `mode` needs experts of a dense model."""
    if mode != "none" and not architecture.moe_layers:
        raise ValueError(
            f"algorithm.routing_replay is {mode!r}: the model has no experts; set it to 'none'"
        )


def encode(experts_NLK: RoutedExperts, experts: int) -> bytes:
    """Return the bytes of `messages.Sample.routes`: one per expert, two beyond 255 experts.

    `UNKNOWN` is written as the largest number.
    """
    kind = _dtype(experts)
    known_NLK = np.where(experts_NLK == UNKNOWN, np.iinfo(kind).max, experts_NLK)
    return known_NLK.astype(kind).tobytes()


def decode(data: bytes, tokens: int, architecture: Architecture) -> RoutedExperts:
    """Return the routed experts of a number of tokens.

    Raises:
        ValueError: bytes of another size, or an expert number beyond the model's.
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
