"""Which experts each token took in an engine whose vLLM does not return them (its CPU build).

Routers tell every choice to a function that is set on them. Rows are kept by request until they
are taken, and by slot of the KV cache: a prefix that is found in the cache is not computed again,
and its experts are those of the pass that filled the cache.

Shape legend: N tokens, L layers with experts (ascending), K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.models.routed_experts import UNKNOWN


class CapturedRoutes:
    """Part of a generator's `worker_extension_cls`: what `collective_rpc` can call."""

    model_runner: Any
    _routes: _Recorder

    def capture_routes(self) -> list[int]:
        """Record from now on; the layers with experts, from 0."""
        self._routes = _Recorder(self.model_runner)
        return self._routes.layers

    def take_routes(self, request_ids: list[str]) -> list[bytes]:
        """int16 [N, L, K] of finished requests: every token that was an input; none is kept."""
        return [self._routes.take(request) for request in request_ids]


@dataclass(slots=True)
class _Rows:
    count: int = 0
    parts: list[Tensor] = field(default_factory=list)

    def add(self, rows_NLK: Tensor) -> None:
        self.parts.append(rows_NLK)
        self.count += len(rows_NLK)


class _Recorder:
    """What the routers of one worker chose.

    Args:
        runner: vLLM's model runner, with its model and KV cache.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self._runner = runner
        found = {m.layer_id: m for m in runner.model.modules() if isinstance(m, MoERunner)}
        self.layers = sorted(found)
        self._pass: list[Tensor] = []
        self._by_request: dict[str, _Rows] = {}
        self._group, self._block = _whole_group(runner.kv_cache_config)
        slots = runner.kv_cache_config.num_blocks * self._block
        per_token = runner.model_config.get_num_experts_per_tok()
        shape = (slots, len(self.layers), per_token)
        self._by_slot = torch.full(shape, UNKNOWN, dtype=torch.int16)
        for place, layer in enumerate(self.layers):
            found[layer].router.set_capture_fn(partial(self._chosen, place))

    def _chosen(self, place: int, experts_NK: Tensor) -> None:
        if place == 0:
            self._pass.clear()
        self._pass.append(experts_NK.to("cpu", torch.int16))
        if len(self._pass) == len(self.layers):
            self._passed(torch.stack(self._pass, dim=1))

    def _passed(self, rows_NLK: Tensor) -> None:
        """A forward pass of the requests in the runner's batch is through its last router."""
        batch, runner = self._runner.input_batch, self._runner
        starts = runner.query_start_loc.np
        blocks = batch.block_table[self._group].block_table.np
        for i in range(batch.num_reqs):
            rows = rows_NLK[starts[i] : starts[i + 1]]
            first = int(batch.num_computed_tokens_cpu[i])
            held = self._by_request.setdefault(_name(batch.req_ids[i]), _Rows())
            cached = max(first - held.count, 0)
            block, offset = np.divmod(np.arange(first - cached, first + len(rows)), self._block)
            slots = torch.from_numpy(blocks[i, block] * np.int64(self._block) + offset)
            self._by_slot[slots[cached:]] = rows
            if cached:
                held.add(self._by_slot[slots[:cached]])
            # A position that is computed again, after preemption, keeps its first experts: those
            # of the pass that its successor was sampled in.
            held.add(rows[held.count - first :])

    def take(self, request: str) -> bytes:
        held = self._by_request.pop(request, _Rows())
        empty = self._by_slot[:0]
        return torch.cat([empty, *held.parts]).numpy().tobytes()


def _whole_group(config: Any) -> tuple[int, int]:
    """(number, tokens of a block) of a group of KV blocks that keeps all blocks of a request."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for number, group in enumerate(config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return number, int(group.kv_cache_spec.block_size)
    raise NotImplementedError(
        "algorithm.routing_replay: no layer of this model attends to its whole past, so vLLM keeps"
        " no blocks by which a cached prefix could be known"
    )


def _name(request: str) -> str:
    # vLLM appends a suffix of its own to the name that a request was given.
    return request.rpartition("-")[0] or request
