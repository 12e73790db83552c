"""Trainer and engine agree on every weight and log-prob after in-flight updates.

The trainer is a Megatron policy in its own process, the engine that of the folder's tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.generator.expert_capture import RequestRoutes
from megatron_rl.messages import ints
from megatron_rl.models import routed_experts
from tests.generator.conftest import Ask, held_weights, needs_vllm
from tests.generator.routed import batch_of
from tests.weights.versions import as_sent

pytestmark = [pytest.mark.e2e, needs_vllm]
TOLERANCE = 1e-4
UPDATES = 3


@pytest.fixture
def started(served: Any, trainer: Ask, tmp_path: Path) -> Iterator[Any]:
    """Yield the engine of a trainer's run; restore transformers' weights for the other tests."""
    version = max(served.models)
    trainer("start", str(served.folder.parent / "v0"), version)
    trainer("open", {"directory": str(tmp_path / "weights"), "bucket_bytes": 50_000})
    yield served
    newest = max(served.models) + UPDATES + 10
    served.models[newest] = served.models[version]
    served.run(lambda: served.engine.update(served.publish(1)))


def prompt(i: int) -> list[int]:
    return [1, *(8 + (7 * i + 3 * j) % 20 for j in range(6 + i % 5)), 4]


PROMPTS = [prompt(i) for i in range(24)]


def worst(found: list[list[float]], expected: list[list[float]]) -> float:
    pairs = zip(found, expected, strict=True)
    return max((torch.tensor(a) - torch.tensor(b)).abs().max().item() for a, b in pairs)


async def update_in_flight(engine: Any, trainer: Ask) -> tuple[list[Any], Any]:
    """Train and swap three times while completions are decoding.

    Returns:
        What each update took, and the completions of `PROMPTS`, three of each.
    """
    tasks: list[asyncio.Task[Any]] = []
    times = []
    for _ in range(UPDATES):
        await asyncio.to_thread(trainer, "train")
        manifest = await asyncio.to_thread(trainer, "publish")
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


def test_weights_and_log_probs_equal_the_trainers_after_three_in_flight_updates(started, trainer):
    engine = started.engine

    async def complete_and_score():
        after = await asyncio.gather(*(engine.complete(p, 20, 5, 1.0) for p in PROMPTS))
        return after, await engine.score(PROMPTS, [c.token_ids for c in after])

    times, _ = started.run(lambda: update_in_flight(engine, trainer))
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
        f"{started.kind}: error of scored tokens {errors[0]:.1e}, of sampled ones"
        f" {errors[1]:.1e}; in flight {[t.requests_in_flight for t in times]}; pauses"
        f" {[round(1e3 * t.pause_seconds) for t in times]} ms, of these loading"
        f" {[round(1e3 * t.transfer_seconds) for t in times]} ms"
    )
    assert max(errors) < TOLERANCE

    exported = {name: torch.from_numpy(array) for name, array in trainer("weights").items()}
    held, weights = started.run(lambda: held_weights(engine)), as_sent(exported)
    assert held.keys() == weights.keys()
    assert [n for n in weights if not held[n].equal(weights[n])] == []


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


def test_the_engine_names_the_experts_that_the_trainer_takes_too(routed, trainer):
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
        b"".join(batch.routes), len(batch.token_ids) // 4, routed.engine.architecture
    )
    unknown = np.flatnonzero((known == routed_experts.UNKNOWN).any(axis=(1, 2)))
    # A last token was an input only where the completion was cut at its answer's budget.
    assert {*unknown.tolist()} <= {*(ints(batch.bounds)[1:] - 1).tolist()}


def test_experts_are_named_for_every_token_of_requests_that_go_on_over_updates(routed, trainer):
    _, completions = routed.run(lambda: update_in_flight(routed.engine, trainer))
    assert max(len(c.spans) for c in completions) > 1
    for p, c in zip(PROMPTS * UPDATES, completions, strict=True):
        assert len(c.routes_NLK) >= len(p) + len(c.token_ids) - 1
        assert (c.routes_NLK != routed_experts.UNKNOWN).all()
