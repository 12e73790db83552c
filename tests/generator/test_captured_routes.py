"""The capture of experts alone: rows of requests, cached prefixes, preemption."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.generator import expert_capture
from megatron_rl.generator.expert_capture import RequestRoutes
from tests.generator.conftest import needs_vllm

pytestmark = needs_vllm
LAYERS, K, BLOCK = [1, 2], 2, 4


class Router:
    def set_capture_fn(self, chosen: Callable[[torch.Tensor], None]) -> None:
        self.chosen = chosen


class Layer:
    def __init__(self, layer_id: int) -> None:
        self.layer_id, self.router = layer_id, Router()


class Worker:
    """A worker whose scheduler is the test; experts of a token are `100 * layer + its number`.

    Its other base, `WorkerExtension`, imports vLLM: the fixture adds it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = "vllm.model_executor.layers.fused_moe.layer"
        monkeypatch.setattr(f"{module}.MoERunner", Layer)
        monkeypatch.setattr(expert_capture, "_whole_group", lambda _: (0, BLOCK))
        self.moe = [Layer(i) for i in reversed(LAYERS)]
        table = SimpleNamespace(block_table=SimpleNamespace(np=np.zeros((4, 8), dtype=np.int32)))
        self.batch = SimpleNamespace(
            num_reqs=0, req_ids=[], num_computed_tokens_cpu=np.zeros(4), block_table=[table]
        )
        self.model_runner = SimpleNamespace(
            model=SimpleNamespace(modules=lambda: [object(), *self.moe]),
            model_config=SimpleNamespace(get_num_experts_per_tok=lambda: K),
            kv_cache_config=SimpleNamespace(num_blocks=16),
            input_batch=self.batch,
            query_start_loc=SimpleNamespace(np=np.zeros(5, dtype=np.int32)),
        )

    def forward(self, *requests: tuple[str, int, list[int], list[int]]) -> None:
        """(id, tokens computed before, blocks, number of each token of this pass)."""
        self.batch.num_reqs = len(requests)
        self.batch.req_ids = [f"{name}-0123abcd" for name, *_ in requests]
        numbers: list[int] = []
        for i, (_, first, blocks, own) in enumerate(requests):
            self.batch.num_computed_tokens_cpu[i] = first
            self.batch.block_table[0].block_table.np[i, : len(blocks)] = blocks
            numbers += own
            self.model_runner.query_start_loc.np[i + 1] = len(numbers)
        tokens = torch.tensor(numbers or [0])[:, None]
        for layer in sorted(self.moe, key=lambda m: m.layer_id):
            layer.router.chosen(100 * layer.layer_id + torch.cat([tokens, tokens + 1], 1))

    def take(self, request: str) -> list[int]:
        """Return the number of each token, from the first expert of the first layer."""
        (data,) = self.take_routes([request])
        rows = np.frombuffer(data, dtype=np.int16).reshape(-1, len(LAYERS), K)
        assert (rows[:, 1] == rows[:, 0] + 100).all() and (rows[..., 1] == rows[..., 0] + 1).all()
        return (rows[:, 0, 0] - 100).tolist()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    from megatron_rl.generator.weight_transfer import WorkerExtension

    made = type("CapturingWorker", (Worker, WorkerExtension), {})(monkeypatch)
    assert made.capture_routes() == LAYERS
    return made


def test_rows_belong_to_their_requests_over_passes(worker: Worker) -> None:
    worker.forward(("a", 0, [3, 5], [0, 1, 2, 3, 4]), ("b", 0, [7], [10, 11]))
    worker.forward(("b", 2, [7], [12]), ("a", 5, [3, 5], [5]))
    worker.forward()  # a pass of no request, as at start-up
    assert worker.take("a") == [0, 1, 2, 3, 4, 5]
    assert worker.take("b") == [10, 11, 12]
    assert worker.take("a") == [], "it was taken before"


def test_a_cached_prefix_has_the_experts_of_the_pass_that_filled_the_cache(worker: Worker) -> None:
    worker.forward(("a", 0, [3, 5], [0, 1, 2, 3, 4]))
    worker.take("a")
    worker.forward(("b", 4, [3, 6], [20, 21]))
    assert worker.take("b") == [0, 1, 2, 3, 20, 21]


def test_a_request_that_was_preempted_keeps_its_first_experts(worker: Worker) -> None:
    worker.forward(("a", 0, [3], [0, 1, 2]))
    worker.forward(("a", 0, [9, 2], [50, 51, 52, 53]))  # from the beginning, one token further
    worker.forward(("a", 4, [9, 2], [54]))
    assert worker.take("a") == [0, 1, 2, 53, 54]


def test_vllms_own_return_is_read_by_layers_with_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_rl.generator.expert_capture.returned_by_vllm", lambda: True)
    architecture: Any = SimpleNamespace(moe_layers={2, 0}, experts_per_token=K, experts=300)
    routes = RequestRoutes(None, architecture)
    asyncio.run(routes.prepare())
    found = np.arange(5 * 3 * K, dtype=np.uint16).reshape(5, 3, K)
    outputs = [SimpleNamespace(outputs=[SimpleNamespace(routed_experts=x)]) for x in (None, found)]
    got = asyncio.run(routes.rows("0", outputs))
    assert got.tolist() == found[:, [0, 2]].tolist()
    encoded = np.frombuffer(routes.encoded(got, 6), dtype="<u2").reshape(6, 2, K)
    assert encoded[:5].tolist() == got.tolist()
    assert (encoded[5] == np.iinfo("u2").max).all()
    assert asyncio.run(routes.rows("1", [])).shape == (0, 2, K)


def test_the_experts_of_an_aborted_request_are_dropped_with_the_next_one_that_ends(
    worker: Worker,
) -> None:
    class Workers:
        async def collective_rpc(self, name: str, args: Any) -> list[Any]:
            return [getattr(worker, name)(*args)]

    architecture: Any = SimpleNamespace(moe_layers={*range(len(LAYERS))}, experts_per_token=K)
    routes = RequestRoutes(Workers(), architecture)
    worker.forward(("a", 0, [3], [0, 1]), ("b", 0, [5], [7]), ("c", 0, [6], [9]))
    for request in "a", "b":
        routes.forget(request)
    rows = asyncio.run(routes.rows("c", []))
    assert (rows[:, 0, 0] - 100).tolist() == [9]
    assert not worker._routes._by_request and not worker._routes._held
    worker.forward(("a", 0, [3], [4]))
    asyncio.run(routes.rows("c", []))
    assert [*worker._routes._by_request] == ["a"], "it was forgotten once"
