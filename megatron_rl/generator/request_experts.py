"""Experts of an engine's requests: vLLM's own return, or the capture in its workers.

Shape legend: N tokens, L layers with experts (ascending), K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_rl.models.base import Architecture
from megatron_rl.models.routed_experts import UNKNOWN, Routes, encode


def returned_by_vllm() -> bool:
    """Whether `enable_return_routed_experts` works here: vLLM's CPU build refuses it."""
    return torch.cuda.is_available() is True


class RequestRoutes:
    """Where the experts of a finished request come from.

    Args:
        llm: the engine's AsyncLLM.
        architecture: of the model that it serves.
    """

    def __init__(self, llm: Any, architecture: Architecture) -> None:
        self._llm, self._architecture = llm, architecture
        self._layers = sorted(architecture.moe_layers)

    async def prepare(self) -> None:
        """Before the first request.

        Raises:
            RuntimeError: vLLM has experts in other layers.
        """
        if returned_by_vllm():
            return
        (layers, *_) = await self._llm.collective_rpc("capture_routes")
        if layers != self._layers:
            raise RuntimeError(
                f"vLLM has experts in layers {layers}, the model's config.json in {self._layers}:"
                " this version does not do what the generator relies on"
            )

    async def of(self, request_id: str, outputs: Sequence[Any]) -> Routes:
        """[N, L, K] of a request that has ended: its tokens but the last, which was no input."""
        k = self._architecture.experts_per_token
        if returned_by_vllm():
            found = next((o.outputs[0].routed_experts for o in reversed(outputs)), None)
            if found is None:
                return np.empty((0, len(self._layers), k), dtype=np.int16)
            return np.asarray(found)[:, self._layers].astype(np.int16)
        (rows, *_) = await self._llm.collective_rpc("take_routes", args=([request_id],))
        return np.frombuffer(rows[0], dtype=np.int16).reshape(-1, len(self._layers), k)

    def encoded(self, routes_NLK: Routes, tokens: int) -> bytes:
        """`Sample.routes` of so many tokens of prompt and completion; what lacks is unknown."""
        lacking = np.full((tokens, *routes_NLK.shape[1:]), UNKNOWN, dtype=np.int16)
        joined = np.concatenate([routes_NLK, lacking])[:tokens]
        return encode(joined, self._architecture.experts)
