"""A fleet that loses generators, and one that grows: what is trained stays the same."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import nullcontext

import pytest

from megatron_rl import messages as m
from megatron_rl.orchestrator import TrainerGone
from megatron_rl.orchestrator.generators import (
    ACKNOWLEDGE_SECONDS,
    CLOSED_SECONDS,
    NO_VERSION,
    Generators,
)
from megatron_rl.orchestrator.groups import Group, GroupQueue
from tests.orchestrator.peers import run, small_config
from tests.orchestrator.test_schedules import changed

QUICK = {"silence_seconds": 1.0, "evaluation_seconds": 20, "startup_seconds": 20}


def order(outcome) -> list:
    return [row["prompt_ids"] for row in outcome.rows.steps]


def check(outcome, lag: int = 2) -> None:
    """Check that a run of small_config() trained what it trains undisturbed."""
    assert [row["step"] for row in outcome.rows.steps] == list(range(12))
    assert order(outcome) == order(run(small_config()))
    assert all(row["completions"] == 12 for row in outcome.rows.steps)
    evals = [row["step"] for row in outcome.rows.evals]
    moved = sum("every generator that had its weights was lost" in n for n in outcome.rows.notes)
    assert {0, 12} <= {*evals} and 4 - moved <= len(evals) <= 4
    assert len({0, 3, 6, 12} - {*evals}) <= moved
    assert max(row["lag_max"] for row in outcome.rows.steps) <= lag


def lost(outcome) -> list[dict]:
    return [row for row in outcome.rows.fleet if row["event"] == "generator_lost"]


@pytest.mark.parametrize("seed", range(4))
def test_generators_that_are_killed_and_started_anew_change_nothing(seed: int) -> None:
    rng = random.Random(seed)

    async def kill(fleet) -> None:
        for step in (1, 3, 5, 8):
            await fleet.at(step)
            await asyncio.sleep(rng.uniform(0.0, 0.05))
            victim = fleet.alive(rng.choice([0, 1]))
            fleet.stop(victim, close=True)
            await asyncio.sleep(rng.uniform(0.0, 0.05))
            fleet.start(victim.index)

    config = changed(small_config(), fleet={"group_attempts": 9})
    outcome = run(config, slowness=0.02, seed=seed, faults=kill)
    check(outcome)
    assert 2 <= len(lost(outcome)) <= 4  # the last one may come after the end
    assert all("restarted" in row["reason"] for row in lost(outcome))
    ready = [row for row in outcome.rows.fleet if row["event"] == "generator_ready"]
    assert len(ready) >= 2 + 1 and all(row["recovery_seconds"] >= 0 for row in ready)


def test_a_generator_that_hangs_is_lost_after_its_silence_and_named() -> None:
    async def hang(fleet) -> None:
        await fleet.at(2)
        fleet.stop(fleet.generators[0], close=False)

    outcome = run(changed(small_config(), timeouts=QUICK), slowness=0.02, faults=hang)
    check(outcome)
    (row,) = lost(outcome)
    assert row["generator"] == "generator-0" and row["process"] == "process 0 on here"
    assert "silent for 1 s (timeouts.silence_seconds)" in row["reason"]
    (note,) = [note for note in outcome.rows.notes if "generator-0" in note]
    assert note.startswith("generator-0 (process 0 on here) is lost: it was silent")


def test_a_closed_connection_is_enough_to_lose_a_generator() -> None:
    async def kill(fleet) -> None:
        await fleet.at(2)
        while not fleet.orchestrator.generators["generator-1"].in_flight:
            await asyncio.sleep(0.002)
        fleet.stop(fleet.generators[1], close=True)

    config = changed(small_config(), schedule={"max_lag_steps": 0})
    outcome = run(config, slowness=0.05, faults=kill)
    check(outcome, lag=0)
    (row,) = lost(outcome)
    assert row["reason"] == "its connection closed" and row["completions_again"] > 0


def test_beginnings_that_a_lost_generator_had_told_are_continued() -> None:
    async def kill(fleet) -> None:
        for generator in fleet.generators:
            generator.grows = True
        waiting, first = fleet.orchestrator.groups, fleet.generators[0]
        await fleet.at(2)
        while not any(g.begun for g in waiting.waiting if g.index in first.groups):
            await asyncio.sleep(0.003)
        fleet.stop(first, close=True)
        fleet.start(0)

    outcome = run(small_config(), slowness=0.1, faults=kill)
    check(outcome)
    (row,) = lost(outcome)
    assert row["completions_continued"] > 0


def test_one_engine_becomes_four_and_then_two() -> None:
    async def change(fleet) -> None:
        fleet.stop(fleet.generators[1], close=True)
        await fleet.at(1)
        others = [fleet.start(index) for index in (5, 6, 7)]
        await fleet.at(3)
        for generator in others[:2]:
            await generator.send(m.Leaving())

    outcome = run(small_config(), slowness=0.02, faults=change)
    check(outcome)
    left = {r["generator"] for r in outcome.rows.fleet if r["event"] == "generator_left"}
    assert left == {"generator-5", "generator-6"}
    assert {row["generators"] for row in outcome.rows.steps} >= {1, 4}
    assert outcome.generators[-1].versions, "the last one worked"


def test_a_generator_that_gives_its_prompts_back_costs_no_attempt() -> None:
    async def leave(fleet) -> None:
        for number in range(4):
            await fleet.at(1 + 2 * number)
            leaver = fleet.generators[-1]
            await leaver.send(m.Leaving())
            await leaver.send(m.Left())
            leaver.send = lambda message: asyncio.sleep(0)
            fleet.stop(leaver, close=False)
            fleet.start(10 + number)

    outcome = run(small_config(), slowness=0.03, faults=leave)
    check(outcome)
    assert not lost(outcome)
    assert sum(row["event"] == "generator_left" for row in outcome.rows.fleet) == 4
    assert not [row for row in outcome.rows.fleet if row["event"] == "prompt_failed"]


def test_a_lost_generator_that_comes_back_to_life_joins_again() -> None:
    async def freeze(fleet) -> None:
        await fleet.at(2)
        generator = fleet.generators[0]
        sent, generator.send = generator.send, lambda message: asyncio.sleep(0)  # it says nothing
        while "generator-0" in fleet.orchestrator.generators:
            await asyncio.sleep(0.01)
        generator.send = sent
        generator.inbox.put_nowait(None)  # what its connection says to a process that was stopped

    config = changed(small_config(), timeouts=QUICK, schedule={"max_lag_steps": 0})
    outcome = run(config, slowness=0.1, faults=freeze)
    check(outcome, lag=0)
    (row,) = lost(outcome)
    assert row["generator"] == "generator-0"
    ready = [r["generator"] for r in outcome.rows.fleet if r["event"] == "generator_ready"]
    assert ready.count("generator-0") == 2


def test_a_prompt_that_every_generator_dies_of_is_dropped_and_named() -> None:
    async def poison(fleet) -> None:
        for generator in fleet.generators:
            generator.capacity = 4  # one prompt at a time
        while True:
            await asyncio.sleep(0.002)
            for generator in list(fleet.generators):
                if 4 in generator.groups and not generator.main.done():
                    fleet.stop(generator, close=True)
                    fleet.start(generator.index, capacity=4)

    outcome = run(small_config(), slowness=0.02, faults=poison)
    assert [row["step"] for row in outcome.rows.steps] == list(range(12))
    events = [row for row in outcome.rows.fleet if row["event"] == "prompt_failed"]
    failed = [prompt for row in events for prompt in row["prompt_ids"]]
    undisturbed = [p for row in run(small_config()).rows.steps for p in row["prompt_ids"]]
    # Another one may have been in work with it each time.
    assert undisturbed[4] in failed and len(failed) <= 2
    trained = [p for row in outcome.rows.steps for p in row["prompt_ids"]]
    rest = [p for p in undisturbed if p not in failed]
    assert trained[: len(rest)] == rest, "the next ones moved up"
    assert sum(row.get("prompts_failed", 0) for row in outcome.rows.steps) == len(failed)
    assert all(row["completions"] == 12 for row in outcome.rows.steps), "never reward 0"


def test_an_evaluation_by_a_share_of_the_engines_leaves_the_others_to_train() -> None:
    config = changed(small_config(), evaluation={"engine_share": 0.5}, roles={"generator_ranks": 4})
    outcome = run(config, slowness=0.02)
    assert [row["step"] for row in outcome.rows.evals] == [0, 3, 6, 12]
    for version in (0, 3, 6):
        assert 1 <= sum(version in g.evaluated for g in outcome.generators) <= 2


def test_an_evaluation_whose_engines_are_all_lost_is_made_again() -> None:
    async def kill(fleet) -> None:
        while not any(key >= 0 for g in fleet.generators for key in g.evaluated):
            await asyncio.sleep(0.002)
        for generator in list(fleet.generators):
            fleet.stop(generator, close=True)
        for index in (0, 1):
            fleet.start(index)

    outcome = run(small_config(), slowness=0.02, faults=kill)
    check(outcome)
    assert len(lost(outcome)) == 2


# ---------------------------------------------------------------- without processes


def fleet_of(*names: str, now: float = 0.0) -> Generators:
    generators = Generators(changed(small_config(), timeouts=QUICK | {"silence_seconds": 30.0}))
    for name in names:
        generators.join(name, "process 1 on here", True, now)
        generators.hello(name, "t", 8)
        generators[name].version = 0
        generators[name].standing = "healthy"
    return generators


def test_silence_makes_suspect_then_lost_and_a_message_healthy_again() -> None:
    fleet = fleet_of("a")
    found = {}
    for now in range(32):
        found[now] = [reason for _, reason in fleet.check(float(now), {}, {})]
        expected = "healthy" if now <= 10 else "suspect"
        assert fleet["a"].standing is expected
        assert (fleet.free(0) is None) == (expected == "suspect")
    assert [now for now, reasons in found.items() if reasons] == [31]
    fleet.message_from("a", 31.5)
    assert fleet.check(32.0, {}, {}) == [] and fleet["a"].standing == "healthy"


def test_a_closed_connection_is_suspect_at_once_and_lost_after_a_while() -> None:
    fleet = fleet_of("a", "b")
    assert fleet.check(1.0, {}, {"a": 0.9}) == []
    assert [g.standing for g in fleet] == ["suspect", "healthy"]
    assert fleet.check(2.0, {}, {}) == []  # it is connected again
    assert fleet["a"].standing == "healthy"
    (one,) = fleet.check(3.0 + CLOSED_SECONDS, {}, {"a": 2.5})
    assert one[0].name == "a"


def test_nobody_is_lost_because_the_orchestrator_itself_was_stopped() -> None:
    fleet = fleet_of("a")
    assert fleet.check(1.0, {}, {}) == []
    assert fleet.check(100.0, {}, {}) == [] and fleet["a"].standing == "healthy"
    times = [100.0 + seconds for seconds in range(1, 33)]
    first = next(now for now in times if fleet.check(now, {}, {}))
    assert 129.0 <= first <= 131.0


def test_a_joining_engine_may_take_its_time_while_its_process_lives() -> None:
    fleet = fleet_of()
    fleet.join("a", "process 1 on here", True, 0.0)
    assert all(fleet.check(float(now), {"a": float(now)}, {}) == [] for now in range(21))
    ((one, reason),) = fleet.check(21.0, {"a": 21.0}, {})
    assert one.name == "a" and "did not start within timeouts.startup_seconds = 20" in reason
    assert fleet["a"].act() == "its engine was starting" and fleet.free(NO_VERSION) is None


def test_an_update_that_is_never_acknowledged_is_a_loss() -> None:
    fleet = fleet_of("a")
    fleet.publish(m.Manifest(version=1, buckets=(), root="/r", nodes=()), set())
    assert [name for name, _ in fleet.updates(set(), lambda *_: "", 0.0)] == ["a"]
    limit = small_config().timeouts.transfer_seconds + ACKNOWLEDGE_SECONDS
    for now in range(0, int(limit), 4):
        fleet.message_from("a", float(now))
        assert fleet.check(float(now), {}, {}) == []
    fleet.message_from("a", limit + 1)
    ((_, reason),) = fleet.check(limit + 1, {}, {})
    assert "has not loaded weights version 1 within timeouts.transfer_seconds" in reason


def test_returned_completions_come_first_and_keep_their_step() -> None:
    queue, draws = GroupQueue(2, lambda group: False), iter(range(100, 200))

    def dispatch() -> tuple[int, list[int]]:
        group, indices = queue.dispatch(lambda: next(draws), lambda i, p: Group(i, p, 3))
        return group.index, indices

    assert [dispatch()[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    assert queue.latest_step(queue.next_to_dispatch) == 2
    queue.lost(3, {0, 2}, attempts=3)
    queue.lost(1, {1}, attempts=3)
    assert queue.latest_step(queue.next_to_dispatch) == 0
    assert dispatch() == (1, [1])
    assert queue.latest_step(queue.next_to_dispatch) == 1
    queue.lost(3, {1}, attempts=3)
    assert dispatch() == (3, [0, 1, 2]) and dispatch() == (5, [0, 1, 2])
    failed = queue.lost(3, {0}, attempts=3)
    assert failed is queue[3] and failed.complete and not failed.samples and queue.get(3) is None
    assert queue.latest_step(5) == 2, "a dropped group is in no step: group 5 is the fifth now"
    assert dispatch()[0] == 6


@pytest.mark.parametrize(("closed", "killed"), [(False, [7]), (True, [])])
def test_a_trainer_is_killed_for_its_silence_only_while_its_connection_is_open(
    monkeypatch: pytest.MonkeyPatch, closed: bool, killed: list[int]
) -> None:
    """A rank that has ended is not silent: the parent may be another process by then."""
    members = "megatron_rl.orchestrator.membership"
    kills: list[int] = []
    monkeypatch.setattr(f"{members}.os.getppid", lambda: 7)
    monkeypatch.setattr(f"{members}.os.kill", lambda pid, _: kills.append(pid))
    membership = run(small_config(steps=3)).orchestrator.membership
    connection = membership._connection
    assert m.TRAINER in membership._trainer_ranks
    start = connection.heard[m.TRAINER] = time.monotonic()
    connection.closed = {m.TRAINER: start} if closed else {}
    limit = small_config().timeouts.silence_seconds
    membership._alone_since = start + 10 * limit
    membership.check(start + 1.5 * limit)
    with nullcontext() if closed else pytest.raises(TrainerGone, match="rank 0 was silent"):
        membership.check(start + 4.5 * limit)
    assert kills == killed
