"""Signs of life of an engine's processes: they answer, or are seen at work.

The core of an engine answers between two steps. A step can take longer than any limit of silence on
a loaded machine, so silence alone is no proof: a process that is stopped, or one that uses no
processor time meanwhile, is taken to hang. One that is busy has `BUSY_WINDOWS` times as long, since
a process that waits for a GPU, or spins on a lock, is busy too. So has one that would run, and gets
no processor.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
from vllm.v1.engine.exceptions import EngineDeadError

BUSY_WINDOWS = 4
BUSY_SHARE = 0.05
"""Processor time of all processes, per time that passed, above which they are busy."""
_SLICES = 10
"""Parts of a window, each waited for by itself: if this process was stopped, one of them is over
when it goes on, before its event loop has read an answer."""


async def check_answer(
    call: Coroutine[Any, Any, object],
    cores: Iterable[BaseProcess],
    processes: Sequence[psutil.Process],
    seconds: float,
    excused: Callable[[], bool],
) -> None:
    """Raise RuntimeError unless a cheap call to the engine's core is answered.

    Args:
        call: to the core.
        cores: child processes, whose end is told.
        processes: all of the engine.
        seconds: one window, after which processes must be at work.
        excused: returns True while the core does something that has a limit of its own.
    """
    answer, windows = asyncio.ensure_future(call), 0
    try:
        while True:
            used, waits = _cpu_seconds(processes), False
            for _ in range(_SLICES):
                await asyncio.wait({answer}, timeout=seconds / _SLICES)
                waits |= any(_state(p) == psutil.STATUS_RUNNING for p in processes)
                _check_running(cores, processes)
                if answer.done():
                    answer.result()
                    return
            windows += not excused()
            share = (_cpu_seconds(processes) - used) / seconds
            _check_states(processes, seconds)
            at_work = waits or share >= BUSY_SHARE
            if windows and (not at_work or windows >= BUSY_WINDOWS):
                raise RuntimeError(
                    f"the engine's core does not answer for {windows * seconds:g} s and more, at"
                    f" {share:.0%} of a processor: it hangs; `py-spy dump --pid` shows where, of"
                    f" {_names(processes)}: in a collective (look at its other processes and GPUs),"
                    " a driver or a file system"
                )
    except EngineDeadError as e:
        raise RuntimeError(f"the engine's core is gone: {e}") from e
    finally:
        answer.cancel()


def _check_running(cores: Iterable[BaseProcess], processes: Sequence[psutil.Process]) -> None:
    ended = [f"{c.name} (process {c.pid}): exit status {c.exitcode}" for c in cores if c.exitcode]
    ended += [f"process {p.pid}" for p in processes if _state(p) in ("", psutil.STATUS_ZOMBIE)]
    if ended:
        raise RuntimeError(
            f"a process of the engine is gone: {'; '.join(ended)}; its own error is above in the"
            " log, unless the kernel ended it (memory: `dmesg`)"
        )


def _check_states(processes: Sequence[psutil.Process], seconds: float) -> None:
    states = psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP
    if stopped := [p for p in processes if _state(p) in states]:
        raise RuntimeError(
            f"the engine's core does not answer for {seconds:g} s, and {_names(stopped)} is"
            " stopped (SIGSTOP, or a debugger): look for what stopped it"
        )


def _cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


def _state(process: psutil.Process) -> str:
    try:
        return str(process.status()) if process.is_running() else ""
    except psutil.NoSuchProcess:
        return ""


def _names(processes: Iterable[psutil.Process]) -> str:
    names = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            names.append(f"{process.name()} (process {process.pid})")
    return ", ".join(names)
