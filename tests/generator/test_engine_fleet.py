"""The engine where processes come and go: continued and cancelled work, versions that come back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from megatron_rl.messages import Manifest, Partial, VersionSpan, float_bytes, int_bytes
from megatron_rl.weights.manifest import WeightsError
from tests.generator import tiny_models
from tests.generator.conftest import held_weights, needs_vllm
from tests.generator.test_engine import TOLERANCE, check_lengths, prompt, worst_error
from tests.weights.versions import Versions

# The architecture makes no difference here.
one_kind = pytest.mark.parametrize("served", ["llama"], indirect=True)
pytestmark = [pytest.mark.e2e, needs_vllm, one_kind]
BUDGET, ANSWER = 100, 60


@pytest.fixture
def reporting(served, monkeypatch) -> Any:
    """Return the engine with reports every 16 tokens."""
    tree = served.engine._config.model_dump(mode="json") | {"fleet": {"report_tokens": 16}}
    config = type(served.engine._config).model_validate(tree)
    monkeypatch.setattr(served.engine, "_config", config)
    return served


def first_part(whole: Any, count: int) -> Partial:
    start, end = whole.forced
    spans = [VersionSpan(s.version, s.start, min(s.end, count)) for s in whole.spans]
    return Partial(
        int_bytes(whole.token_ids[:count]),
        float_bytes(whole.logprobs[:count]),
        [s for s in spans if s.start < count],
        (start, end) if end and start < count else (0, 0),
    )


async def complete_and_note(
    engine: Any, prompt_ids: list[int], begun: Partial | None, reports: list[Any]
) -> Any:
    def note(start: int, rest: Partial) -> None:
        reports.append((start, rest))

    return await engine.complete(prompt_ids, BUDGET, ANSWER, 1.0, begun, note)


def check_reports(reports: list[tuple[int, Partial]], whole: Any, begun: int) -> int:
    """Check that each report is the next part of the completion; return the tokens reported."""
    for start, rest in reports:
        assert start == begun
        begun = start + rest.num_tokens
        expected = first_part(whole, begun)
        ids, logprobs = expected.token_ids[4 * start :], expected.logprobs[4 * start :]
        assert rest == Partial(ids, logprobs, expected.spans, expected.forced)
    assert begun < len(whole.token_ids) or not reports
    return begun


def test_completions_tell_how_they_grow_and_go_on_from_there_as_if_never_cut(reporting):
    engine, prompts = reporting.engine, [prompt(i, 8 + i % 5) for i in range(32)]
    made = [reporting.make(seed) for seed in range(700, 704)]
    reports: list[list[Any]] = [[] for _ in prompts]

    async def work() -> Any:
        pairs = zip(prompts, reports, strict=True)
        tasks = [asyncio.create_task(complete_and_note(engine, p, None, r)) for p, r in pairs]
        for version, tensors in made:
            while sum(map(len, reports)) < 20 * (version - made[0][0]) + 1:
                await asyncio.sleep(0.001)
            await engine.update(reporting.versions.write(version, tensors))
        whole = await asyncio.gather(*tasks)
        counts = [check_reports(r, c, 0) for r, c in zip(reports, whole, strict=True)]
        # By turns in thinking and after the phrase, where there is one.
        after = [min(c.forced[1] + 1, len(c.token_ids) - 1) for c in whole]
        counts = [e if e > BUDGET else n for n, e in zip(counts, after, strict=True)]
        counts = [min(n, 17) if i % 2 else n for i, n in enumerate(counts)]
        begun = [first_part(c, n) for c, n in zip(whole, counts, strict=True)]
        again: list[list[Any]] = [[] for _ in prompts]
        await engine.update(reporting.publish(704))
        each = zip(prompts, begun, again, strict=True)
        ends = await asyncio.gather(*(complete_and_note(engine, *one) for one in each))
        return begun, again, ends

    begun, again, ends = reporting.run(work)
    assert max(len(rest.spans) for r in reports for _, rest in r) > 1, "reported over no update"
    assert engine.aborted == 0
    newest = engine.version
    for p, b, r, c in zip(prompts, begun, again, ends, strict=True):
        check_lengths(c)
        count = b.num_tokens
        check_reports(r, c, count)
        assert first_part(c, count) == b
        assert {s.version for s in c.spans if s.end > max(count, c.forced[1])} <= {newest}
        assert worst_error(reporting, p, c, BUDGET, begun=count) < TOLERANCE
    forced = [b.forced[1] > 0 for b in begun]
    assert any(forced) and not all(forced)


def test_with_routing_replay_a_beginning_is_refused(served, monkeypatch):
    monkeypatch.setattr(served.engine, "routes", object())
    begun = Partial(int_bytes([9]), float_bytes([-1.0]), [VersionSpan(0, 0, 1)], (0, 0))
    with pytest.raises(ValueError, match=r"algorithm.routing_replay, completions are made again"):
        served.run(lambda: served.engine.complete(prompt(0), 10, 5, 1.0, begun))


async def blocks_are_free(engine: Any) -> bool:
    """Return True once vLLM has no request any more: only then can its prefix cache be reset."""
    return bool(await engine._llm.engine_core.reset_prefix_cache_async())


def test_cancelled_completions_and_scores_leave_nothing_in_the_engine(served):
    engine, prompts = served.engine, [prompt(i, 20) for i in range(24)]

    async def work() -> Any:
        tasks = [asyncio.create_task(engine.complete(p, 140, 20, 1.0)) for p in prompts]
        # At each point of a request's life: before its first step, submitted, decoding.
        tasks[0].cancel()
        await asyncio.sleep(0)
        tasks[1].cancel()
        while engine._requests._not_begun:
            await asyncio.sleep(0.001)
            tasks[2].cancel()
        for task in tasks[3:12]:
            task.cancel()
        ends = await asyncio.gather(*tasks[:12], return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        assert len(engine._llm.output_processor.request_states) <= engine.in_flight <= 12
        rest = await asyncio.gather(*tasks[12:])
        scores = asyncio.create_task(engine.score(prompts, prompts))
        while not engine.in_flight:
            await asyncio.sleep(0)
        scores.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await scores
        assert scores.cancelled()
        assert engine.in_flight == 0 and not engine._requests._not_begun
        assert not engine._llm.output_processor.request_states
        assert await blocks_are_free(engine)
        await engine.update(served.publish(710))
        return rest, await engine.score(prompts[:2], prompts[:2])

    rest, (version, _) = served.run(work)
    assert engine.aborted == 0
    assert version == engine.version
    for p, completion in zip(prompts[12:], rest, strict=True):
        check_lengths(completion)
        assert worst_error(served, p, completion, 140) < TOLERANCE


def test_a_request_that_is_cancelled_while_vllm_submits_it_is_aborted(served, monkeypatch):
    engine, core = served.engine, served.engine._llm.engine_core
    add = core.add_request_async

    async def add_slowly(request: Any) -> None:
        await add(request)
        await asyncio.sleep(60)

    async def work() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(core, "add_request_async", add_slowly)
            task = asyncio.create_task(engine.complete(prompt(1), 150, 20, 1.0))
            while not engine._llm.output_processor.request_states:
                await asyncio.sleep(0.001)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert not engine._llm.output_processor.request_states
        assert await blocks_are_free(engine)

    served.run(work)
    assert engine.in_flight == engine.aborted == 0


def all_slots_are_free(versions: Versions) -> bool:
    with contextlib.ExitStack() as locks:
        for store in versions.stores:
            for slot in (0, 1):
                locks.enter_context(store.locked(slot, write=True, seconds=0))
    return True


def test_an_update_that_is_cancelled_before_its_swap_leaves_nothing_locked(served, monkeypatch):
    engine, versions = served.engine, served.versions
    before, manifest = engine.version, served.publish(720)

    async def cancelled_at(reached: asyncio.Event, release: Any) -> None:
        task = asyncio.create_task(engine.update(manifest))
        await reached.wait()
        task.cancel()
        release()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.version == before
        assert all_slots_are_free(versions)

    async def work() -> None:
        # While it waits for the lock of a slot, in a thread: the writer has it.
        reached = asyncio.Event()
        with contextlib.ExitStack() as lock:
            slot = versions.stores[0].complete(manifest.version)
            lock.enter_context(versions.stores[0].locked(slot, write=True, seconds=0))
            asyncio.get_running_loop().call_later(0.1, reached.set)
            await cancelled_at(reached, lock.close)
        # While workers map it.
        reached, rpc = asyncio.Event(), engine._llm.collective_rpc

        async def stalled(name: str, *args: Any, **kwargs: Any) -> Any:
            if name == "version_mapped":
                reached.set()
                await asyncio.sleep(60)
            return await rpc(name, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(engine._llm, "collective_rpc", stalled)
            await cancelled_at(reached, lambda: None)
        await engine.update(manifest)

    served.run(work)
    assert engine.version == manifest.version
    held, expected = served.run(lambda: held_weights(engine)), served.published(manifest.version)
    assert all(held[n].equal(expected[n]) for n in expected)


def test_an_update_that_is_cancelled_in_its_swap_finishes_it(served, monkeypatch):
    engine, manifest = served.engine, served.publish(730)
    prompts = [prompt(i, 12) for i in range(8)]

    async def work() -> Any:
        reached, goes_on, load = asyncio.Event(), asyncio.Event(), engine._llm.update_weights

        async def gated(request: Any) -> None:
            reached.set()
            await goes_on.wait()
            await load(request)

        running = [asyncio.create_task(engine.complete(p, 140, 20, 1.0)) for p in prompts]
        while engine._requests._not_begun or not engine.in_flight:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(engine._llm, "update_weights", gated)
        task = asyncio.create_task(engine.update(manifest))
        await reached.wait()
        for _ in range(2):  # a second cancellation changes nothing
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.version == manifest.version
        return await asyncio.gather(*running), await held_weights(engine)

    completions, held = served.run(work)
    expected = served.published(manifest.version)
    assert all(held[n].equal(expected[n]) for n in expected)
    assert engine.aborted == 0
    for p, completion in zip(prompts, completions, strict=True):
        assert worst_error(served, p, completion, 140) < TOLERANCE
    assert all_slots_are_free(served.versions)


def test_an_update_whose_core_ends_in_its_swap_ends_when_it_is_cancelled(served, monkeypatch):
    engine, manifest = served.engine, served.publish(735)

    async def work() -> None:
        reached = asyncio.Event()

        async def never_answered(manifest: Manifest) -> None:
            reached.set()
            await asyncio.sleep(60)

        monkeypatch.setattr(engine, "_swap", never_answered)
        monkeypatch.setattr(engine, "_failed", asyncio.get_running_loop().create_future())
        task = asyncio.create_task(engine.update(manifest))
        await reached.wait()
        monkeypatch.setattr(engine, "cores", [SimpleNamespace(exitcode=-9)])
        task.cancel()
        with pytest.raises(RuntimeError, match="a process of the engine is gone"):
            await asyncio.wait_for(asyncio.shield(task), 5)

    served.run(work)
    assert all_slots_are_free(served.versions)


def mapped(engine: Any, versions: Versions) -> list[int]:
    """Return how often each process of the engine, this one first, maps files of these stores."""
    gc.collect()  # an error of an earlier test may keep what it had mapped
    maps = [Path(f"/proc/{p.pid}/maps").read_text() for p in (psutil.Process(), *engine._processes)]
    counts = [text.count(f"{versions.root}/") for text in maps]
    counts[0] -= 5 * len(versions.stores)  # those of the writer, in this process
    return counts


@pytest.fixture
def restarted(served, tmp_path):
    """Yield (stores of another incarnation of the trainer, the engine's own)."""
    other = Versions(tmp_path / "weights", 100_000, owners=2)
    yield other, served.versions
    served.run(lambda: served.engine.update(served.publish(740)))
    other.close()


def test_another_incarnations_versions_are_loaded_whatever_their_numbers(
    served, restarted, monkeypatch
):
    engine, (other, versions) = served.engine, restarted
    long_prompt = prompt(3, 80)  # two full blocks of 32
    served.run(lambda: engine.update(served.publish(741)))
    assert mapped(engine, versions)[0] == max(mapped(engine, versions)[1:]) == 10
    number = engine.version

    async def cached(ids: list[int]) -> int:
        from megatron_rl.generator.vllm_sampling import sampling

        outputs = await engine._requests.run(ids, sampling(4, 1.0))
        return outputs[-1].num_cached_tokens

    async def work(manifest: Manifest) -> Any:
        counts = [await cached(long_prompt) for _ in range(2)]
        await engine.update(manifest)
        again = [await cached(long_prompt) for _ in range(2)]
        await engine.update(msgspec.structs.replace(manifest))  # the same bytes once more
        completion = await engine.complete(prompt(1), 60, 5, 1.0)
        return counts, [*again, await cached(long_prompt)], completion

    for version, seed in (number, 742), (number - 1, 743):
        monkeypatch.setitem(served.models, version, tiny_models.build(served.kind, seed))
        tensors = served.published(version)
        other._previous = -1
        for store in other.stores:
            store.header.versions_2N[:] = -1
        manifest = other.write(version, tensors)
        counts, again, completion = served.run(lambda m=manifest: work(m))
        assert counts[-1] == 64
        assert again == [0, 64, 64]
        assert engine.version == version
        held = served.run(lambda: held_weights(engine))
        assert all(held[n].equal(tensors[n]) for n in tensors)
        assert {s.version for s in completion.spans} == {version}
        assert worst_error(served, prompt(1), completion, 60) < TOLERANCE
        assert not any(mapped(engine, versions))
        assert mapped(engine, other)[0] == max(mapped(engine, other)[1:]) == 10
    served.run(engine.forget_stores)
    assert not any(mapped(engine, other))


def test_weights_that_come_back_read_no_blocks_that_others_computed_meanwhile(served, restarted):
    engine, (other, _) = served.engine, restarted
    (first, tensors), (second, others) = served.make(750), served.make(751)
    manifests = served.versions.write(first, tensors), served.versions.write(second, others)

    starts = [prompt(i, 40 + i) for i in range(8)]

    async def work() -> tuple[Any, Any]:
        await engine.update(manifests[0])
        pieces = [engine.complete(p, 150, 20, 1.0) for p in starts]
        running = [asyncio.create_task(piece) for piece in pieces]
        while engine._requests._not_begun or not engine.in_flight:
            await asyncio.sleep(0.001)
        await engine.update(manifests[1])
        wholes = await asyncio.gather(*running)
        await engine.update(other.write(first, tensors))
        begun = [first_part(whole, len(whole.token_ids) - 1) for whole in wholes]
        pairs = zip(starts, begun, strict=True)
        return wholes, await asyncio.gather(
            *(engine.complete(p, 150, 20, 1.0, b) for p, b in pairs)
        )

    wholes, ends = served.run(work)
    for p, whole, end in zip(starts, wholes, ends, strict=True):
        assert end.spans[-1].version == first
        assert worst_error(served, p, end, 150, len(whole.token_ids) - 1) < TOLERANCE
    # Some end before the update.
    assert any(len(whole.spans) > 1 and len(whole.token_ids) > 64 for whole in wholes)


def test_a_version_whose_writer_is_gone_is_refused_and_the_engine_goes_on(served, restarted):
    engine, (other, _) = served.engine, restarted
    version, tensors = served.make(760)
    manifest = other.write(version, tensors)
    shutil.rmtree(other.root)
    with pytest.raises(WeightsError, match="has no store"):
        served.run(lambda: engine.update(manifest))
    assert served.run(lambda: engine.complete(prompt(1), 10, 5, 1.0)).token_ids
