"""The pool: verdicts survive dying workers; a dead verifier is an error and never a reward."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import time
from typing import Any
from unittest import mock

import pytest

from benchmarks.rewards.bombs import BOMBS, bomb, typical
from megatron_rl.rewards.base import Outcome, Verdict, VerifierDown
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier_settings import VerifierSettings
from tests.rewards.conftest import children

pytestmark = pytest.mark.usefixtures("nothing_left")
HERE = "tests.rewards.custom_rewards"


def run(coroutine: Any, seconds: float = 270.0) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(bounded())


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pids(pool: VerifierPool) -> list[int]:
    return [pid for w in pool.workers for pid in (w.pid, *children(w.pid))]


def math_pool(**settings: Any) -> VerifierPool:
    return VerifierPool(VerifierSettings.model_validate(settings), ("math",))


def exact_pool(**settings: Any) -> VerifierPool:
    """Return a pool whose workers start at once: they import no library of mathematics."""
    return VerifierPool(VerifierSettings.model_validate(settings), ("exact",))


def exact(number: int) -> tuple[str, str, str]:
    """Return a request with the right answer, of `exact_pool`."""
    return "exact", f"</think>\\boxed{{{number}}}<eos>", f"{number}"


async def verdicts_of(pool: VerifierPool, cases: list[dict[str, Any]]) -> list[Verdict]:
    calls = (pool.verify("math", c["completion"], c["gold"]) for c in cases)
    return await asyncio.gather(*calls)


def test_workers_killed_at_random_change_no_verdict_and_lose_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = typical(2000, seed=1)

    async def main() -> tuple[list[Verdict], int, int]:
        async with math_pool(workers=2) as pool:
            stop = asyncio.Event()
            kills = verdicts = verdicts_before = 0
            verify_blocking = pool.verify_blocking

            def counted(*request: Any) -> Verdict:
                nonlocal verdicts
                verdict = verify_blocking(*request)
                verdicts += 1
                return verdict

            monkeypatch.setattr(pool, "verify_blocking", counted)

            async def killer() -> None:
                nonlocal kills, verdicts_before
                rng = random.Random(3)
                # Bounded: a new worker needs seconds until it can verify.
                while not stop.is_set() and kills < 10:
                    # Mostly the process that verifies; at times the fork server.
                    verifying = [p for w in pool.workers for p in children(w.pid)]
                    fork_servers = [w.pid for w in pool.workers]
                    # Workers killed faster than they start (seconds, more on a busy machine) would
                    # rightly count as down.
                    if verifying and verdicts > verdicts_before:
                        kill([rng.choice(fork_servers if kills in (2, 6) else verifying)])
                        kills, verdicts_before = kills + 1, verdicts
                    await asyncio.sleep(rng.uniform(0.05, 0.2))

            task = asyncio.create_task(killer())
            got = await verdicts_of(pool, cases)
            stop.set()
            await task
            return got, pool.stats.deaths, kills

    got, deaths, kills = run(main())
    differ = [(g, c) for g, c in zip(got, cases, strict=True) if g.outcome.value != c["verdict"]]
    assert differ == []
    assert kills >= 5
    assert deaths >= 2


def test_killing_all_workers_again_and_again_is_a_named_error_for_every_waiter() -> None:
    async def main() -> list[Any]:
        async with math_pool(workers=2, max_deaths=4) as pool:
            stop = asyncio.Event()

            async def killer() -> None:
                while not stop.is_set():
                    kill([p for w in pool.workers for p in children(w.pid)])
                    await asyncio.sleep(0.01)  # the workers need the processor, too

            task = asyncio.create_task(killer())
            slow = "\\boxed{\\int_0^{\\infty} \\frac{\\sin x}{x} dx}"
            calls = [pool.verify("math", f"</think>{slow}", "5") for _ in range(20)]
            got = await asyncio.gather(*calls, return_exceptions=True)
            stop.set()
            await task
            with pytest.raises(VerifierDown, match="died in a row"):
                await pool.verify("math", "</think>\\boxed{1}", "1")
            return list(got)

    got = run(main())
    assert [type(g) for g in got] == [VerifierDown] * 20
    assert "4 verifier workers died in a row" in str(got[0])


def test_all_workers_killed_once_are_replaced() -> None:
    async def main() -> Verdict:
        async with exact_pool(workers=2) as pool:
            before = set(pids(pool))
            kill(list(before))
            verdict = await pool.verify(*exact(2))
            assert pool.stats.deaths >= 1
            assert set(pids(pool)) - before
            return verdict

    assert run(main()).passed


def test_a_process_with_many_open_files_has_workers_too() -> None:
    """Check descriptors beyond 1023, which `select` rejects; a worker inherits its socket's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"the hard limit of open files is {hard}")

    async def main() -> Verdict:
        async with exact_pool(workers=1) as pool:
            return await pool.verify(*exact(2))

    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
        for _ in range(1100):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert run(main()).passed


def test_a_stopped_worker_is_killed_and_another_verifies_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_rl.rewards.pool.GRACE_SECONDS", 2.0)

    async def main() -> tuple[Verdict, int]:
        async with exact_pool(workers=1, wall_seconds=0.5, cpu_seconds=0.5) as pool:
            (worker,) = pool.workers
            assert (await pool.verify(*exact(1))).passed
            for pid in children(worker.pid):
                os.kill(pid, signal.SIGSTOP)
            return await pool.verify(*exact(7)), pool.stats.deaths

    verdict, deaths = run(main())
    assert verdict.passed
    assert deaths == 1


def test_bombs_change_no_good_verdict_and_end_within_their_limit() -> None:
    good = typical(600, seed=2)
    mixed = [dict(c, good=True) for c in good]
    for i in range(len(BOMBS)):
        mixed.insert(12 * i, {"completion": bomb(i), "gold": "5", "good": False})

    async def main() -> list[str]:
        async with math_pool(workers=2, cpu_seconds=1.0) as pool:
            return [v.outcome.value for v in await verdicts_of(pool, mixed)]

    started = time.monotonic()
    got = run(main())
    assert [g for g, c in zip(got, mixed, strict=True) if c["good"]] == [c["verdict"] for c in good]
    bombs = [g for g, c in zip(got, mixed, strict=True) if not c["good"]]
    assert set(bombs) <= {"timed_out", "wrong", "unparsable", "no_answer"}
    assert time.monotonic() - started < 90


@pytest.mark.parametrize(
    "limits",
    [{"cpu_seconds": 0.3}, {"cpu_seconds": 600, "math": {"stock_cpu_seconds": 0.1}}],
    ids=["of a verdict", "of math-verify"],
)
def test_over_the_cpu_limit_is_timed_out_and_the_next_answer_is_right(
    limits: dict[str, Any],
) -> None:
    slow = "</think>\\boxed{\\int_0^{\\infty} \\frac{\\sin x}{x} dx}"

    async def main() -> list[Verdict]:
        async with math_pool(workers=1, **limits) as pool:
            return [
                await pool.verify("math", slow, "5"),
                await pool.verify("math", "</think>\\boxed{5}", "5"),
            ]

    first, second = run(main())
    assert first == Verdict(Outcome.TIMED_OUT, "over the CPU time limit of a verdict")
    assert second.passed


def test_the_queue_holds_back_when_it_is_full() -> None:
    async def main() -> None:
        async with exact_pool(workers=1, queue_size=4) as pool:
            worker = pool._idle.get()  # every call waits for it
            with mock.patch.object(pool._threads, "submit", wraps=pool._threads.submit) as submit:
                calls = [asyncio.create_task(pool.verify(*exact(1))) for _ in range(50)]
                await asyncio.sleep(0)
                admitted, full = submit.call_count, pool.full
                pool._idle.put(worker)
                assert all(v.passed for v in await asyncio.gather(*calls))
            assert (admitted, full) == (1 + 4, True)
            assert submit.call_count == 50 and not pool.full

    run(main())


def test_workers_are_replaced_at_the_leak_limit() -> None:
    async def main() -> tuple[set[int], int]:
        seen: set[int] = set()
        async with exact_pool(workers=1, verdicts_per_worker=5) as pool:
            for _ in range(23):
                assert (await pool.verify(*exact(1))).passed
                seen.update(children(pool.workers[0].pid))
            return seen, pool.stats.deaths

    seen, deaths = run(main())
    assert len(seen) >= 4
    assert deaths == 0


def test_a_growing_worker_is_replaced() -> None:
    async def main() -> set[int]:
        settings = VerifierSettings(workers=1, custom=f"{HERE}:leak", growth_mib=50)
        seen: set[int] = set()
        async with VerifierPool(settings, ("custom",)) as pool:
            for _ in range(140):
                await pool.verify("custom", "x", "")
                seen.update(children(pool.workers[0].pid))
        return seen

    assert len(run(main())) >= 2


def test_memory_over_the_limit_is_a_verdict_and_not_a_death() -> None:
    async def main() -> tuple[Verdict, int]:
        settings = VerifierSettings(workers=1, custom=f"{HERE}:greedy", memory_mib=100)
        async with VerifierPool(settings, ("custom",)) as pool:
            return await pool.verify("custom", "", ""), pool.stats.deaths

    verdict, deaths = run(main())
    assert verdict == Verdict(Outcome.TIMED_OUT, "over the memory limit of 100 MiB")
    assert deaths == 0


def test_an_answer_on_which_workers_crash_twice_is_timed_out() -> None:
    async def main() -> list[Verdict]:
        settings = VerifierSettings(workers=1, custom=f"{HERE}:crash")
        async with VerifierPool(settings, ("custom",)) as pool:
            return [await pool.verify("custom", c, "") for c in ("boom", "fine")]

    first, second = run(main())
    assert first.outcome is Outcome.TIMED_OUT
    assert "SIGSEGV" in first.reason
    assert second.passed


def test_an_unexpected_exception_of_a_verifier_is_no_reward() -> None:
    async def main() -> tuple[Verdict, int]:
        async with VerifierPool(VerifierSettings(workers=1), ("reasoning",)) as pool:
            return await pool.verify("reasoning", "</think>\\boxed{5}", "5"), pool.stats.bugs

    verdict, bugs = run(main())
    assert (verdict.outcome, bugs) == (Outcome.TIMED_OUT, 1)
    assert "KeyError: 'dataset'" in verdict.reason
    assert VerifierSettings().values.of(verdict) is None


async def verify_custom(path: str | None, *completions: str) -> list[Verdict]:
    async with VerifierPool(VerifierSettings(workers=1, custom=path), ("custom",)) as pool:
        return [await pool.verify("custom", c, "yes", {"key": 1}) for c in completions]


@pytest.mark.parametrize("name", ["sync_reward", "async_reward", "verdict_reward"])
def test_custom_rewards_are_functions_or_coroutines(name: str) -> None:
    verdicts = run(verify_custom(f"{HERE}:{name}", "yes", "no"))
    assert [v.passed for v in verdicts] == [True, False]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "set verifier.custom"),
        ("no_colon", "write it as `package.module:name`"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        (f"{HERE}:missing", "has no attribute 'missing'"),
        (f"{HERE}:NUMBER", "not callable"),
    ],
)
def test_a_custom_reward_that_cannot_be_loaded_stops_the_start(path: str, message: str) -> None:
    with pytest.raises(VerifierDown, match=message):
        run(verify_custom(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "KeyError: 'nothing'"),
        ("returns_text", "returned str, expected bool, float or Verdict"),
    ],
)
def test_a_custom_reward_that_fails_is_an_error_and_no_reward(name: str, message: str) -> None:
    with pytest.raises(VerifierDown, match=message):
        run(verify_custom(f"{HERE}:{name}", "x"))


def test_a_graded_reward_comes_through_as_it_is() -> None:
    async def main() -> list[Verdict]:
        settings = VerifierSettings(workers=1, custom=f"{HERE}:graded")
        async with VerifierPool(settings, ("custom",)) as pool:
            verdicts = [await pool.verify("custom", c, "") for c in ("0.25", "-1", "0", "half")]
            with pytest.raises(VerifierDown, match="the reward nan is not finite"):
                await pool.verify("custom", "nan", "")
            return verdicts

    verdicts = run(main())
    assert [v.reward for v in verdicts] == [0.25, -1.0, 0.0, 0.5]
    assert [v.passed for v in verdicts] == [True, False, False, False]
    assert [VerifierSettings().values.of(v) for v in verdicts] == [0.25, -1.0, 0.0, 0.5]


def test_a_worker_that_cannot_start_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")

    async def main() -> None:
        async with math_pool(workers=1):
            pass

    with pytest.raises(VerifierDown, match="did not start"):
        run(main())


def test_another_task_kind_than_the_pools_is_an_error() -> None:
    async def main() -> None:
        async with VerifierPool(VerifierSettings(workers=1), ("exact",)) as pool:
            assert (await pool.verify("exact", "</think>\\boxed{5}<eos>", "5")).passed
            await pool.verify("math", "5", "5")

    with pytest.raises(VerifierDown, match="started for exact, not for 'math'"):
        run(main())


def test_every_outcome_reaches_the_caller() -> None:
    async def main() -> list[str]:
        async with math_pool(workers=1) as pool:
            boxes = (f"\\boxed{{{answer}}}" for answer in ("1", "2", "2 3", "9^{9^9}"))
            calls = (pool.verify("math", f"</think>{a}", "1") for a in ("nothing", *boxes))
            return [(await call).outcome.value for call in calls]

    assert run(main()) == ["no_answer", "correct", "wrong", "unparsable", "timed_out"]


def test_closing_the_pool_ends_waiting_calls() -> None:
    async def main() -> BaseException | Verdict:
        async with math_pool(workers=1) as pool:
            slow = "</think>\\boxed{\\int_0^{\\infty} \\frac{\\sin x}{x} dx}"
            call = asyncio.create_task(pool.verify("math", slow, "5"))
            await asyncio.sleep(0.1)
        return (await asyncio.gather(call, return_exceptions=True))[0]

    error = run(main())
    assert isinstance(error, VerifierDown)
    assert "closed" in str(error)
