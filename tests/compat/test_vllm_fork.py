"""vLLM forks the processes of an engine on a CPU, unless they have threads or the user says so."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import distributed as dist

from megatron_rl.compat import import_hook, vllm_fork
from megatron_rl.config import RunConfig
from megatron_rl.generator.process_environment import prepare_environment
from tests.generator.conftest import needs_vllm

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
MODULES = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")
pytestmark = needs_vllm


def modules() -> list[Any]:
    return [importlib.import_module(name) for name in MODULES]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back vLLM's own functions, in an environment that is restored afterwards."""
    changed = modules()  # imported before the hook loses its other changes
    before = dict(os.environ)
    os.environ.pop(METHOD, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(import_hook, "_CHANGES", [])
    from vllm.utils.system_utils import get_mp_context

    for module in changed:
        monkeypatch.setattr(module, "get_mp_context", get_mp_context)
    yield
    os.environ.clear()
    os.environ.update(before)


def methods() -> set[str]:
    prepare_environment(RunConfig(), "")
    os.environ[METHOD] = "spawn"  # as vLLM's CPU platform does
    return {module.get_mp_context().get_start_method() for module in modules()}


def test_the_change_is_still_needed() -> None:
    for module, evidence in vllm_fork.EVIDENCE.items():
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        assert evidence in Path(spec.origin).read_text(), "upstream changed"


def test_another_release_spawns_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    assert methods() == {"spawn"}


def test_processes_of_one_thread_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert methods() == {"fork"}


def test_processes_with_threads_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert methods() == {"spawn"}


def test_the_users_choice_stays() -> None:
    os.environ[METHOD] = "spawn"
    assert methods() == {"spawn"}


def test_a_fork_leaves_the_garbage_of_its_parent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A destroyed Gloo group in it would wait for threads that the fork does not have."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    methods()
    gc.collect()
    gc.disable()
    try:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        cycle = [dist.group.WORLD]
        cycle.append(cycle)
        dist.destroy_process_group()
        del cycle
        process = modules()[0].get_mp_context().Process(target=gc.collect)
        process.start()
        process.join(30)
        assert process.exitcode == 0
    finally:
        gc.enable()
        process.kill()


def test_a_fork_has_a_process_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    methods()
    context = modules()[0].get_mp_context()
    queue = context.SimpleQueue()
    process = context.Process(target=lambda: queue.put((os.getpid(), os.getpgrp())))
    process.start()
    pid, group = queue.get()
    process.join(30)
    assert pid == group == process.pid != os.getpgrp()
    assert not psutil.pid_exists(process.pid) and process.exitcode == 0
