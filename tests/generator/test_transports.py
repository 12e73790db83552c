"""Trainer and engine agree on every log-prob after in-flight updates, by every transport of a CPU.

The trainer is a Megatron policy in its own process, the engine that of the folder's tests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

import torch.distributed as dist
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

from megatron_rl.generator.expert_capture import RequestRoutes
from megatron_rl.messages import ints
from megatron_rl.models import routed_experts
from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.rendezvous import Rendezvous
from megatron_rl.weights.transports import ReceiverInfo
from tests.generator.conftest import Ask
from tests.generator.held_weights import held_weights
from tests.generator.routed import batch_of

pytestmark = pytest.mark.e2e
TOLERANCE = 1e-4
UPDATES = 3
SECONDS = 30.0


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    """Return a store as torchrun's agent hosts it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def switch(served: Any, trainer: Ask, store: Any, transport: str, folder: Path) -> None:
    """Have both ends use this transport from now on."""
    weights: dict[str, Any] = {"transport": transport, "bucket_bytes": 50_000}
    if transport == "disk":
        weights["directory"] = str(folder)
    rendezvous = Rendezvous("127.0.0.1", store.port, f"{served.kind} {time.monotonic_ns()}")
    trainer("open", rendezvous, weights, SECONDS)
    engine = served.engine
    tree = engine._config.model_dump(mode="json")
    tree["weights"] |= {"directory": None, **weights}
    tree["timeouts"]["transfer_seconds"] = SECONDS
    engine._config = type(engine._config).model_validate(tree)
    init = {"receiver": ReceiverInfo.of(engine._config, 0, rendezvous)}
    served.run(lambda: engine._llm.init_weight_transfer_engine(WeightTransferInitRequest(init)))


@pytest.fixture
def started(served: Any, trainer: Ask) -> Iterator[Any]:
    """Yield the engine with the trainer's weights; restore transformers' for the other tests."""
    config, version = served.engine._config, max(served.models)
    trainer("start", str(served.folder.parent / "v0"), version)
    yield served
    served.engine._config = config
    init = {"receiver": ReceiverInfo.of(config, 0, Rendezvous("", 0, ""))}
    served.run(
        lambda: served.engine._llm.init_weight_transfer_engine(WeightTransferInitRequest(init))
    )
    newest = max(served.models) + 2 * UPDATES + 10
    served.models[newest] = served.models[version]
    served.run(lambda: served.engine.update(served.publish(1)))


def prompt(i: int) -> list[int]:
    return [1, *(8 + (7 * i + 3 * j) % 20 for j in range(6 + i % 5)), 4]


PROMPTS = [prompt(i) for i in range(24)]


def worst(found: list[list[float]], expected: list[list[float]]) -> float:
    pairs = zip(found, expected, strict=True)
    return max((torch.tensor(a) - torch.tensor(b)).abs().max().item() for a, b in pairs)


async def update_in_flight(engine: Any, trainer: Ask, transport: str) -> tuple[list[Any], Any]:
    """Train and swap three times while completions are decoding.

    Returns:
        What each update took, and the completions of `PROMPTS`, three of each.
    """
    tasks: list[asyncio.Task[Any]] = []
    times = []
    for _ in range(UPDATES):
        await asyncio.to_thread(trainer, "train")
        manifest = await asyncio.to_thread(trainer, "publish")
        assert manifest.transport == transport
        assert len(manifest.buckets) > 3
        tasks += [asyncio.create_task(engine.complete(p, 140, 20, 1.0)) for p in PROMPTS]
        while not engine.in_flight:
            await asyncio.sleep(0.001)
        times.append(await engine.update(manifest))
        assert engine.version == manifest.version
    return times, await asyncio.gather(*tasks)


def sampled(completion: Any, logprobs: list[float]) -> list[float]:
    """Those of the tokens that were not forced: the generator has none of the others."""
    start, end = completion.forced
    return logprobs[:start] + logprobs[end:] if end else logprobs


def test_log_probs_equal_the_trainers_after_three_in_flight_updates_by_each_transport(
    started, trainer, store, tmp_path
):
    engine = started.engine

    async def complete_and_score():
        after = await asyncio.gather(*(engine.complete(p, 20, 5, 1.0) for p in PROMPTS))
        return after, await engine.score(PROMPTS, [c.token_ids for c in after])

    for transport in ("gloo", "disk"):
        switch(started, trainer, store, transport, tmp_path / "weights")
        times, _ = started.run(lambda t=transport: update_in_flight(engine, trainer, t))
        assert engine.aborted == 0
        assert sum(t.requests_in_flight > 0 for t in times) >= 2

        after, (version, scores) = started.run(complete_and_score)
        assert version == engine.version
        examples = [(p, c.token_ids) for p, c in zip(PROMPTS, after, strict=True)]
        expected = trainer("score", examples)
        pairs = list(zip(after, expected, strict=True))
        errors = (
            worst(scores, expected),
            worst([sampled(c, c.logprobs) for c in after], [sampled(c, e) for c, e in pairs]),
        )
        print(
            f"{started.kind} by {transport}: error of scored tokens {errors[0]:.1e}, of sampled"
            f" ones {errors[1]:.1e}; in flight {[t.requests_in_flight for t in times]}; pauses"
            f" {[round(1e3 * t.pause_seconds) for t in times]} ms"
        )
        assert max(errors) < TOLERANCE

        held, weights = started.run(lambda: held_weights(engine)), trainer("weights")
        assert held.keys() == weights.keys()
        assert [n for n in weights if not held[n].equal(torch.from_numpy(weights[n]))] == []


@pytest.fixture
def routed(started: Any) -> Iterator[Any]:
    """Yield an engine that returns its experts."""
    engine = started.engine
    if not engine.architecture.moe_layers:
        pytest.skip(f"{started.kind} has no experts")
    engine.routes = RequestRoutes(engine._llm, engine.architecture)
    started.run(engine.routes.prepare)
    yield started
    engine.routes = None


def test_the_engine_names_the_experts_that_the_trainer_takes_too(routed, trainer, store, tmp_path):
    switch(routed, trainer, store, "disk", tmp_path / "weights")
    trainer("train")
    manifest = trainer("publish")
    routed.run(lambda: routed.engine.update(manifest))
    batch, completions = routed.run(lambda: batch_of(routed.engine))
    assert any(c.forced[1] for c in completions), "none was interrupted and resubmitted"
    found = trainer("metrics", batch, "compare")
    assert found["routes_differing_fraction"] == 0.0
    assert found["same_version_logprob_error_max"] < TOLERANCE
    # Experts of cached prefixes, of versions and of interrupted requests are all known.
    known = routed_experts.decode(
        batch.routes, len(batch.token_ids) // 4, routed.engine.architecture
    )
    unknown = np.flatnonzero((known == routed_experts.UNKNOWN).any(axis=(1, 2)))
    # A last token was an input only where the completion was cut at its answer's budget.
    assert {*unknown.tolist()} <= {*(ints(batch.bounds)[1:] - 1).tolist()}


def test_experts_are_named_for_every_token_of_requests_that_go_on_over_updates(
    routed, trainer, store, tmp_path
):
    switch(routed, trainer, store, "disk", tmp_path / "weights")
    _, completions = routed.run(lambda: update_in_flight(routed.engine, trainer, "disk"))
    assert max(len(c.spans) for c in completions) > 1
    for p, c in zip(PROMPTS * UPDATES, completions, strict=True):
        assert len(c.routes_NLK) >= len(p) + len(c.token_ids) - 1
        assert (c.routes_NLK != routed_experts.UNKNOWN).all()


def test_a_broken_update_by_gloo_leaves_the_engine_as_it_was_and_the_trainer_is_told(
    started, trainer, store, tmp_path
):
    engine = started.engine
    switch(started, trainer, store, "gloo", tmp_path)
    trainer("train")
    good = trainer("publish")
    started.run(lambda: engine.update(good))
    before = started.run(lambda: held_weights(engine))
    trainer("train")
    broken = trainer("publish")
    trainer("flip_a_bit")

    async def work():
        running = asyncio.create_task(engine.complete(prompt(1), 100, 20, 1.0))
        await asyncio.sleep(0.02)
        with pytest.raises(WeightsError, match=rf"version {broken.version}, bucket 00000: check"):
            await engine.update(broken)
        return await running, await held_weights(engine)

    completion, held = started.run(work)
    assert engine.version == good.version == completion.spans[-1].version
    assert all(torch.equal(held[n], before[n]) for n in before)
    said = trainer("failure", SECONDS)
    assert f"version {broken.version} did not reach generator 0" in said
    assert "bucket 00000: checksum" in said
    # The next version is taken as ever.
    trainer("train")
    manifest = trainer("publish")
    started.run(lambda: engine.update(manifest))
    assert engine.version == manifest.version
