"""What a killed engine leaves on its node is removed by the next one, and nothing of others."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENGINE = """
import os, sys
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

from megatron_rl.generator import engine_folder

engine_folder.make()
folder = Path(os.environ[engine_folder.FOLDER])
engine_folder.use(folder)
memory = shared_memory.SharedMemory(create=True, size=100)
(folder / "socket").touch()
print(folder, memory.name, os.environ["VLLM_RPC_BASE_PATH"], flush=True)
sys.stdin.read()
memory.close()
memory.unlink()
"""
OF_PARENT = "/dev/shm/of_the_parent"


def start(place: str = OF_PARENT) -> tuple[subprocess.Popen[str], list[Path]]:
    """Start a stand-in of a generator; return it, and the folder and the memory that it has.

    Its parent process has an engine, too; `place` is where that one's sockets are.
    """
    pipe, cwd = subprocess.PIPE, Path(__file__).parents[2]
    inherited = {"MEGATRON_RL_ENGINE_FOLDER": OF_PARENT, "VLLM_RPC_BASE_PATH": place}
    environment = {**os.environ, **inherited}
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE],
        stdin=pipe, stdout=pipe, text=True, start_new_session=True, cwd=cwd, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    folder, memory, sockets = process.stdout.readline().split()
    assert sockets == (folder if place == OF_PARENT else place)
    assert Path("/dev/shm", memory).name.startswith(f"{Path(folder).name}.")
    return process, [Path(folder), Path("/dev/shm", memory)]


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_what_a_killed_engine_left_is_removed_and_what_others_have_is_not() -> None:
    others = Path(f"/dev/shm/psm_{os.getpid()}_of_others")
    others.touch()
    killed, living = start(), start()
    try:
        os.killpg(killed[0].pid, signal.SIGKILL)  # with the process that would remove its memory
        killed[0].wait(60)
        assert all(path.exists() for path in [*killed[1], *living[1], others])
        last = start()
        assert not any(path.exists() for path in killed[1])
        assert all(path.exists() for path in [*living[1], *last[1], others])
        for process, paths in (last, living):
            end(process)
            assert not any(path.exists() for path in paths)
        assert others.exists()
    finally:
        others.unlink()
        for process in (killed[0], living[0]):
            process.kill()
            process.communicate()


def test_a_place_of_sockets_that_the_user_chose_is_kept() -> None:
    end(start("/chosen")[0])


def test_an_engines_process_that_is_forked_keeps_the_folder(tmp_path: Path) -> None:
    """A generator may be killed before the processes of its engine are."""
    forking = ENGINE.replace("sys.stdin.read()", "os.fork() and sys.stdin.read(); sys.stdin.read()")
    process = subprocess.Popen(
        [sys.executable, "-c", forking],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    folder = Path(process.stdout.readline().split()[0])
    time.sleep(0.2)  # until the fork
    process.kill()
    process.wait(60)
    end(start()[0])
    assert folder.exists()
    os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while folder.exists():  # until the kernel has ended the fork
        end(start()[0])
        assert time.monotonic() < deadline
    process.communicate()


@pytest.mark.parametrize("name", ["multiproc_executor", "uniproc_executor"])
def test_vllm_still_names_its_file_of_a_process_group_so(name: str) -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.origin).parent / "v1" / "executor" / f"{name}.py"
    assert "distributed_init_method = get_file_store_init_method()" in source.read_text()
