"""The experts of each token: returned by vLLM itself or, in its CPU build, captured in its workers.

The capture: routers pass every choice to a function that is set on them. Rows are kept by request
until they are taken, and by slot of the KV cache: a prefix that is in the cache is not computed
again, and its experts are those of the pass that filled the cache.

Shape legend: N tokens, L layers with experts (ascending), K experts of a token.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.models.base import Architecture
from megatron_rl.models.routed_experts import UNKNOWN, RoutedExperts, encode

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


def returned_by_vllm() -> bool:
    """Return True where `enable_return_routed_experts` works: vLLM's CPU build refuses it."""
    return torch.cuda.is_available() is True


class RequestRoutes:
    """The experts of finished requests of an AsyncLLM that serves a model of this architecture."""

    def __init__(self, llm: Any, architecture: Architecture) -> None:
        self._llm, self._architecture = llm, architecture
        self._layers = sorted(architecture.moe_layers)
        self._forgotten: list[str] = []

    async def prepare(self) -> None:
        """Start the capture, before the first request.

        Raises:
            RuntimeError: vLLM has experts in other layers.
        """
        if returned_by_vllm():
            return
        (layers, *_) = await self._llm.collective_rpc("capture_routes")
        if layers != self._layers:
            raise RuntimeError(
                f"vLLM has experts in layers {layers}, the model's config.json in {self._layers}:"
                " unsupported behavior of this release"
            )

    async def of(self, outputs: Sequence["RequestOutput"]) -> RoutedExperts:
        """Return [N, L, K] of all inputs of the request that ended with these outputs."""
        request = outputs[-1].request_id
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        inputs = len(outputs[-1].prompt_token_ids or ()) + tokens - 1
        routes_NLK = (await self.rows(request, outputs))[:inputs]
        if len(routes_NLK) < inputs or (routes_NLK == UNKNOWN).any():
            known = int((routes_NLK != UNKNOWN).all(axis=(1, 2)).sum())
            raise RuntimeError(
                f"vLLM returned the experts of {known} of {inputs} tokens (request {request}):"
                " unsupported behavior of this release"
            )
        return routes_NLK

    async def rows(self, request_id: str, outputs: Sequence[Any]) -> RoutedExperts:
        """Return [N, L, K] of a finished request: of its tokens except the last, never an input."""
        k = self._architecture.experts_per_token
        if returned_by_vllm():
            experts = outputs[-1].outputs[0].routed_experts if outputs else None
            if experts is None:
                return np.empty((0, len(self._layers), k), dtype=np.int16)
            return np.asarray(experts)[:, self._layers].astype(np.int16)
        ids, self._forgotten = [request_id, *self._forgotten], []
        (rows, *_) = await self._llm.collective_rpc("take_routes", args=(ids, 1))
        return np.frombuffer(rows[0], dtype=np.int16).reshape(-1, len(self._layers), k)

    def forget(self, request_id: str) -> None:
        """Have the workers drop the experts of a request that was aborted, with the next `rows`."""
        self._forgotten.append(request_id)

    def encoded(self, routes_NLK: RoutedExperts, tokens: int) -> bytes:
        """Return `Sample.routes` of so many tokens of prompt and completion; pad with unknown."""
        padding = np.full((tokens, *routes_NLK.shape[1:]), UNKNOWN, dtype=np.int16)
        return encode(np.concatenate([routes_NLK, padding])[:tokens], self._architecture.experts)


class RouteRecorder:
    """The choices of the routers of one worker; `runner` has its model and KV cache."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self._runner = runner
        moe = {m.layer_id: m for m in runner.model.modules() if isinstance(m, MoERunner)}
        self.layers = sorted(moe)
        self._pass: list[Tensor] = []
        self._by_request: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._held: Counter[str] = Counter()  # rows by request
        self._group, self._block = _whole_group(runner.kv_cache_config)
        slots = runner.kv_cache_config.num_blocks * self._block
        shape = (slots, len(self.layers), runner.model_config.get_num_experts_per_tok())
        self._by_slot = torch.full(shape, UNKNOWN, dtype=torch.int16)
        for position, layer in enumerate(self.layers):
            moe[layer].router.set_capture_fn(partial(self._on_choice, position))

    def _on_choice(self, position: int, experts_NK: Tensor) -> None:
        if position == 0:
            self._pass.clear()
        self._pass.append(experts_NK.to("cpu", torch.int16))
        if len(self._pass) == len(self.layers):
            self._on_pass(torch.stack(self._pass, dim=1))

    def _on_pass(self, rows_NLK: Tensor) -> None:
        batch, runner = self._runner.input_batch, self._runner
        starts = runner.query_start_loc.np
        blocks = batch.block_table[self._group].block_table.np
        for i in range(batch.num_reqs):
            rows = rows_NLK[starts[i] : starts[i + 1]]
            first = int(batch.num_computed_tokens_cpu[i])
            request = batch.req_ids[i]
            # vLLM appends its own suffix to the id of a request.
            request = request.rpartition("-")[0] or request
            parts, held = self._by_request[request], self._held[request]
            cached = max(first - held, 0)
            block, offset = np.divmod(np.arange(first - cached, first + len(rows)), self._block)
            slots = torch.from_numpy(blocks[i, block] * np.int64(self._block) + offset)
            self._by_slot[slots[cached:]] = rows
            if cached:
                parts.append(self._by_slot[slots[:cached]])
            # A position that is computed again, after preemption, keeps its first experts: those
            # of the pass that its successor was sampled in.
            parts.append(rows[held + cached - first :])
            self._held[request] += cached + len(parts[-1])

    def take(self, request: str) -> bytes:
        """Return int16 [N, L, K] of a finished request, and forget it."""
        self._held.pop(request, None)
        parts = self._by_request.pop(request, [])
        return torch.cat([self._by_slot[:0], *parts]).numpy().tobytes()


def _whole_group(config: Any) -> tuple[int, int]:
    """Return (number, tokens of a block) of a group of KV blocks with all blocks of a request."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for number, group in enumerate(config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return number, int(group.kv_cache_spec.block_size)
    raise NotImplementedError(
        "algorithm.routing_replay: no layer of this model attends to its whole past, so vLLM keeps"
        " no blocks that identify a cached prefix; set it to 'none'"
    )
