"""Environments in worker processes: turns, failures, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.rollout_settings import RolloutSettings
from megatron_rl.rollouts.environments import host as host_module
from megatron_rl.rollouts.environments.host import EnvironmentHost, Episode
from megatron_rl.rollouts.rollout import RolloutError
from tests.rollouts.environment_cases import ORPHAN

CASES = "tests.rollouts.environment_cases"
ROOT = Path(__file__).parents[2]
SECONDS = 0.5


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "GRACE_SECONDS", 1.5)


def settings(workers: int = 1, seconds: float = SECONDS) -> RolloutSettings:
    return RolloutSettings(
        workers=workers, environment_seconds=seconds, tool_result_tokens=100, max_turns=4
    )


def row(gold: object) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "Guess."}], "gold": gold, "meta": {}}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def run(work: Callable[[EnvironmentHost], Awaitable[None]], name: str, **options: Any) -> None:
    """Run a test's coroutine with a host of one worker, which must leave no process."""
    with_settings = options.pop("settings", settings())

    async def main() -> None:
        async with EnvironmentHost(f"{CASES}:{name}", options, with_settings) as host:
            await work(host)

    async def bounded() -> None:
        await asyncio.wait_for(main(), 30)

    asyncio.run(bounded())
    assert children(os.getpid()) == []


def read(path: Path) -> str:
    """Return a file of /proc; empty if its process has ended."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def stat(process: Path) -> list[str]:
    """Return state, parent and further numbers of a process."""
    return read(process / "stat").rpartition(")")[2].split()


def children(pid: int) -> list[int]:
    """Return the workers that a process has."""
    stats = {
        p.parent: read(p).rpartition(")")[2].split() for p in Path("/proc").glob("[0-9]*/stat")
    }
    own = [process for process, stat in stats.items() if stat[1:2] == [str(pid)]]
    return [int(p.name) for p in own if "environments.episodes" in read(p / "cmdline")]


def alive(pid: int) -> bool:
    return stat(Path(f"/proc/{pid}"))[:1] not in ([], ["Z"])


async def play(host: EnvironmentHost, gold: int) -> list[float | None]:
    """Guess from above, and return the rewards."""
    rewards: list[float | None] = []
    async with host.episode(row(str(gold))) as episode:
        opening = await episode.reset()
        assert opening.messages[0]["content"] == "Guess."
        assert opening.tools[0]["function"]["name"] == "guess"
        for guess in range(gold + 2, 0, -1):
            step = await episode.step(said(str(guess)))
            rewards.append(step.reward)
            if step.done:
                assert step.reason == "found"
                break
            assert step.messages == [{"role": "user", "content": "less"}]
    return rewards


async def fails(work: Awaitable[Any], cause: str, words: str) -> None:
    with pytest.raises(RolloutError, match=words) as failure:
        await work
    assert failure.value.cause == cause


async def fails_at_step(host: EnvironmentHost, word: str, cause: str, words: str) -> None:
    async with host.episode(row("3")) as episode:
        await episode.reset()
        await fails(episode.step(said(word)), cause, words)


@pytest.mark.parametrize("name", ["Guess", "AsyncGuess"])
def test_episodes_take_turns_at_the_same_time(name: str, tmp_path: Path) -> None:
    """Many episodes in few processes keep apart, and each is closed once."""
    log = tmp_path / "closed"

    async def work(host: EnvironmentHost) -> None:
        rewards = await asyncio.gather(*(play(host, gold) for gold in range(1, 9)))
        assert rewards == [[None, None, 1 / 3]] * 8
        async with host.episode(row("1")) as episode:
            opening = await episode.reset()
            assert opening.messages[1]["content"] == "It is above 7."

    run(work, name, floor=7, log=str(log), settings=settings(2, 10.0))
    assert sorted(log.read_text().split()) == sorted([*"12345678", "1"])


FAILURES = [
    ("Guess", "raise", "raised", "step raised ZeroDivisionError: no guess"),
    ("Guess", "sleep", "timed out", "longer than 0.5 s .rollout.environment_seconds"),
    ("Guess", "spin", "timed out", "was killed"),
    ("Guess", "exit", "died", "died"),
    ("Guess", "leave a child", "died", "died"),
    ("AsyncGuess", "wait", "timed out", "longer than 0.5 s"),
    ("AsyncGuess", "will not end", "timed out", "longer than 0.5 s"),
    ("AsyncGuess", "spin", "timed out", "was killed"),
    ("Flood", "1601", "flooded", "1601 characters, and 1600 are allowed"),
    ("Flood", "70000000", "flooded", "70000000 characters"),
    ("Wrong", "surrogate", "raised", "text that is not Unicode"),
    ("Wrong", "type", "raised", "returned str instead of Step"),
    ("Wrong", "field", "raised", "Expected `float . null`, got `str`"),
]


@pytest.mark.parametrize(("name", "word", "cause", "words"), FAILURES)
def test_a_failure_has_its_cause_and_the_next_episode_works(
    name: str, word: str, cause: str, words: str
) -> None:
    async def work(host: EnvironmentHost) -> None:
        ticks, ticking = 0, True

        async def tick() -> None:
            nonlocal ticks
            while ticking:
                await asyncio.sleep(0.05)
                ticks += 1

        ticker = asyncio.create_task(tick())
        begun = time.monotonic()
        await fails_at_step(host, word, cause, words)
        waited = time.monotonic() - begun
        ticking = False
        await ticker
        assert ticks >= 0.3 * waited / 0.05  # the event loop went on
        async with host.episode(row("3")) as episode:
            assert (await episode.reset()).messages[1]["content"] == "It is above 0."

    run(work, name)
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if ORPHAN in read(p)]


def test_reset_fails_as_a_step_does() -> None:
    async def work(host: EnvironmentHost) -> None:
        async with host.episode(row("none")) as episode:
            await fails(episode.reset(), "raised", "reset raised ValueError")
        async with host.episode(row("wait")) as episode:
            await fails(episode.reset(), "timed out", "reset took longer")
        assert await play(host, 2) == [None, None, 1 / 3]

    run(work, "AsyncGuess")


def test_others_of_a_dead_process_fail_and_those_of_another_go_on() -> None:
    async def work(host: EnvironmentHost) -> None:
        async with contextlib.AsyncExitStack() as stack:
            begun: list[Episode] = []
            for _ in range(4):  # one after the other into the worker with the fewest
                begun.append(await stack.enter_async_context(host.episode(row("3"))))
                await begun[-1].reset()
            waiting = asyncio.create_task(begun[2].step(said("wait")))
            await asyncio.sleep(0.1)
            await fails(begun[0].step(said("exit")), "died", "died")
            await fails(waiting, "died", "died")
            for episode in (begun[1], begun[3]):
                assert (await episode.step(said("3"))).done
            await fails(begun[2].step(said("3")), "died", "died")
        assert await play(host, 2) == [None, None, 1 / 3]

    run(work, "AsyncGuess", settings=settings(2, 10.0))


def test_only_the_episode_whose_call_ended_a_process_has_had_an_attempt() -> None:
    async def work(host: EnvironmentHost) -> None:
        for word in ("exit", "spin"):
            async with host.episode(row("3")) as guilty, host.episode(row("3")) as idle:
                await asyncio.gather(guilty.reset(), idle.reset())
                for episode, text, innocent in ((guilty, word, False), (idle, "2", True)):
                    with pytest.raises(RolloutError) as failure:
                        await episode.step(said(text))
                    assert failure.value.innocent == innocent

    run(work, "Guess")


def test_others_of_a_process_with_a_stuck_call_go_on() -> None:
    """The process takes no new episode and ends with its last one."""

    async def work(host: EnvironmentHost) -> None:
        (first,) = children(os.getpid())
        async with host.episode(row("3")) as episode:
            await episode.reset()
            await fails_at_step(host, "sleep", "timed out", "longer")
            async with host.episode(row("4")) as later:
                await later.reset()
                assert len(children(os.getpid())) == 2
            assert (await episode.step(said("3"))).done
        for _ in range(100):
            if not alive(first):
                break
            await asyncio.sleep(0.05)
        assert not alive(first)

    run(work, "Guess")


@pytest.mark.parametrize(("name", "word"), [("Guess", "nap"), ("AsyncGuess", "wait")])
def test_a_call_that_nobody_waits_for_ends_and_its_process_goes_on(name: str, word: str) -> None:
    async def work(host: EnvironmentHost) -> None:
        async with host.episode(row("3")) as episode:
            await episode.reset()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(episode.step(said(word)), 0.1)
        (before,) = children(os.getpid())
        assert await play(host, 2) == [None, None, 1 / 3]
        assert children(os.getpid()) == [before]

    run(work, name, settings=settings(1, 20.0))


def test_what_an_environment_prints_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    async def work(host: EnvironmentHost) -> None:
        await fails_at_step(host, "print", "raised", "invalid literal")

    run(work, "Guess", settings=settings(1, 10.0))
    assert "xxx" not in capfd.readouterr().out


def test_an_environment_that_cannot_be_loaded_says_why() -> None:
    async def start(path: str) -> None:
        async with EnvironmentHost(path, {}, settings()):
            pass

    for path, words in {
        "no.such.module:Class": "No module named 'no'",
        f"{CASES}:Absent": "no attribute 'Absent'",
    }.items():
        asyncio.run(fails(start(path), "raised", f"{path} cannot be loaded: .*{words}"))
    assert children(os.getpid()) == []


def test_workers_end_with_a_killed_generator() -> None:
    """Also one whose event loop spins in C code."""
    program = f"""
import asyncio
from megatron_rl.rollouts.environments.host import EnvironmentHost
from tests.rollouts import test_environments as tests

async def main():
    async with EnvironmentHost("{CASES}:AsyncGuess", {{}}, tests.settings(2, 100.0)) as host:
        async with host.episode(tests.row("3")) as episode:
            await episode.reset()
            print("ready", flush=True)
            await episode.step(tests.said("spin"))

asyncio.run(main())
"""
    generator = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert generator.stdout is not None
    assert generator.stdout.readline() == "ready\n"
    time.sleep(0.3)
    workers = children(generator.pid)
    assert len(workers) == 2
    generator.send_signal(signal.SIGKILL)
    generator.wait(timeout=10)
    generator.stdout.close()
    for _ in range(100):
        if not any(map(alive, workers)):
            break
        time.sleep(0.05)
    assert not any(map(alive, workers))
