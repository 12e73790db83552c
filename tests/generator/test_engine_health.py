"""An engine that hangs, is stopped or gone is told from one that is at work."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.generator import tiny_models
from tests.generator.conftest import needs_vllm, run_config, running_engine
from tests.generator.test_engine import prompt
from tests.weights.versions import Versions, as_sent

pytestmark = [pytest.mark.e2e, needs_vllm]
SECONDS = 0.4
IDLE = "import time; print(flush=True); time.sleep(60)"
BUSY = "print(flush=True)\nwhile True: pass"


@pytest.fixture
def start() -> Iterator[Any]:
    """Yield a function that starts a process with this source."""
    started: list[subprocess.Popen[bytes]] = []

    def start(source: str) -> psutil.Process:
        process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline()
        return psutil.Process(process.pid)

    yield start
    for process in started:
        process.kill()
        process.communicate()


def check(
    process: psutil.Process, *, answer_after: float = 60.0, excused: bool = False, cores: Any = ()
) -> float:
    """Check an engine of this process; return the seconds that it took."""
    from megatron_rl.generator.engine_health import check_answer

    began = time.monotonic()
    call = asyncio.sleep(answer_after)
    asyncio.run(check_answer(call, cores, [process], SECONDS, lambda: excused))
    return time.monotonic() - began


def test_a_process_that_answers_is_alive(start):
    check(start(IDLE), answer_after=SECONDS / 2)


def test_silence_without_work_is_a_hang_after_one_window(start):
    process, began = start(IDLE), time.monotonic()
    with pytest.raises(RuntimeError, match=rf"it hangs; `py-spy dump .*process {process.pid}\)"):
        check(process)
    assert SECONDS <= time.monotonic() - began < 3 * SECONDS


def test_a_process_at_work_has_four_windows(start):
    process = start(BUSY)
    assert check(process, answer_after=2.5 * SECONDS) >= 2.5 * SECONDS
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"does not answer for 1\.6 s"):
        check(process)
    assert time.monotonic() - began >= 4 * SECONDS


def test_a_process_that_gets_no_processor_has_four_windows_too(start):
    from megatron_rl.generator.engine_health import BUSY_SHARE

    core = min(os.sched_getaffinity(0))
    process, other = start(BUSY), start(BUSY)
    for one in (process, other):
        one.cpu_affinity([core])
    os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
    before = sum(process.cpu_times()[:2])
    with pytest.raises(RuntimeError, match=r"does not answer for 1\.6 s"):
        check(process)
    assert sum(process.cpu_times()[:2]) - before < 4 * SECONDS * BUSY_SHARE


def test_work_with_a_limit_of_its_own_is_waited_for(start):
    assert check(start(IDLE), answer_after=3 * SECONDS, excused=True) >= 3 * SECONDS


def test_a_stopped_process_is_named_also_in_work_with_a_limit_of_its_own(start):
    process = start(BUSY)
    process.suspend()
    for excused in (False, True):
        with pytest.raises(RuntimeError, match=rf"process {process.pid}\) is stopped \(SIGSTOP"):
            check(process, excused=excused)


def test_a_process_that_is_gone_is_named_at_once(start):
    process, began = start(IDLE), time.monotonic()
    process.kill()
    core = SimpleNamespace(name="EngineCore", pid=process.pid, exitcode=-9)
    with pytest.raises(
        RuntimeError, match=rf"EngineCore \(process {process.pid}\): exit status -9"
    ):
        check(process, cores=[core])
    with pytest.raises(RuntimeError, match=rf"is gone: process {process.pid}; "):
        check(process)
    assert time.monotonic() - began < 2 * SECONDS


def test_an_answer_that_came_while_this_process_was_stopped_counts(start):
    from megatron_rl.generator.engine_health import check_answer

    process = start(IDLE)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        answer = loop.create_future()

        async def call() -> None:
            await answer
            for _ in range(20):  # a message passes through some tasks
                await asyncio.sleep(0)

        loop.call_later(SECONDS / 20, time.sleep, 3 * SECONDS)  # as SIGSTOP and SIGCONT
        thread = threading.Timer(SECONDS, loop.call_soon_threadsafe, (answer.set_result, (None)))
        thread.start()
        await check_answer(call(), (), [process], SECONDS, lambda: False)
        thread.join()

    asyncio.run(work())


def test_an_engine_whose_core_is_stopped_or_gone_or_between_two_versions_must_be_ended(tmp_path):
    model_dir = tiny_models.save("llama", 0, tmp_path / "v0")
    versions = Versions(tmp_path / "weights", 100_000)
    tiny_models.save("llama", 1, tmp_path / "next")
    manifest = versions.write(1, as_sent(tiny_models.checkpoint(tmp_path / "next")))
    with running_engine(run_config(model_dir), model_dir) as (engine, loop):

        def forget_failure() -> None:
            engine._failed = loop.create_future()

        def run(work: Any) -> Any:
            return loop.run_until_complete(asyncio.wait_for(work, 60))

        async def busy() -> None:
            tasks = [
                asyncio.create_task(engine.complete(prompt(i), 150, 20, 1.0)) for i in range(32)
            ]
            while not all(task.done() for task in tasks):
                await engine.check_alive(5.0)

        run(busy())
        (core,) = engine.cores
        psutil.Process(core.pid).send_signal(signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=rf"process {core.pid}\) is stopped"):
            run(engine.check_alive(SECONDS))
        psutil.Process(core.pid).send_signal(signal.SIGCONT)
        with pytest.raises(RuntimeError, match="is stopped"):  # it stays so
            run(engine.check_alive(SECONDS))
        forget_failure()
        run(engine.check_alive(5.0))

        async def cancelled_in_swap(then: Any) -> None:
            reached, goes_on = asyncio.Event(), asyncio.Event()

            async def broken() -> None:
                reached.set()
                await goes_on.wait()
                raise OSError("no memory")

            engine._llm.start_weight_update = broken
            task = asyncio.create_task(engine.update(manifest))
            await reached.wait()
            task.cancel()
            await then(goes_on)
            await task

        async def hangs(_: asyncio.Event) -> None:
            psutil.Process(core.pid).send_signal(signal.SIGSTOP)
            with pytest.raises(RuntimeError, match="is stopped"):
                await engine.check_alive(SECONDS)
            psutil.Process(core.pid).send_signal(signal.SIGCONT)

        async def fails(goes_on: asyncio.Event) -> None:
            goes_on.set()

        with pytest.raises(RuntimeError, match="is stopped"):
            run(cancelled_in_swap(hangs))
        forget_failure()
        error = r"swap to weights version 1 .*OSError: no memory.* must be ended"
        with pytest.raises(RuntimeError, match=error):
            run(cancelled_in_swap(fails))
        with pytest.raises(RuntimeError, match=error):
            run(engine.check_alive(5.0))
        forget_failure()
        core.kill()
        with pytest.raises(RuntimeError, match=rf"is gone: .*process {core.pid}"):
            run(engine.check_alive(5.0))
    versions.close()
