"""Names of what the processes of an engine share through their node: they tell whose it is.

    /dev/shm/megatron_rl_engine_<random>/     vLLM's sockets and its store of a process group
    /dev/shm/megatron_rl_engine_<random>.*    shared memory of vLLM's processes

The generator holds the folder (`weights.store.hold`), and removes all of it at its end. What a
killed one leaves, hundreds of MB with tensor parallelism, is removed at the next start of a
generator or a trainer on the node (`weights.store.remove_unused`), and nothing of anyone else.
"""

import atexit
import os
import secrets
import tempfile
from functools import cache
from multiprocessing import shared_memory
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_rl.compat.import_hook import after_import
from megatron_rl.weights.store import FOLDER_PREFIX, SHARED_MEMORY, hold, remove_unused

FOLDER = "MEGATRON_RL_ENGINE_FOLDER"  # environment variable: the folder, for the engine's processes
_SOCKETS = "VLLM_RPC_BASE_PATH"
_EXECUTORS = ("vllm.v1.executor.multiproc_executor", "vllm.v1.executor.uniproc_executor")


def make() -> None:
    """Make the folder of this process's engine, after those of killed ones are removed."""
    folder = _folder()
    # A value that an engine of the parent process has set is not for this one.
    if os.environ.get(_SOCKETS) in (None, os.environ.get(FOLDER)):
        os.environ[_SOCKETS] = str(folder)
    os.environ[FOLDER] = str(folder)


@cache
def _folder() -> Path:
    for parent in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        remove_unused(parent, FOLDER_PREFIX)
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}engine_", dir=SHARED_MEMORY))
    descriptor = hold(folder)

    def remove() -> None:
        os.close(descriptor)
        remove_unused(SHARED_MEMORY, folder.name)

    atexit.register(remove)
    return folder


def remove_groups() -> None:
    """Remove the memory of groups of workers on a CPU, all of which have ended.

    Their C++ destructors would; processes that are forked or killed end without them.
    """
    for shared in SHARED_MEMORY.glob(f"{_folder().name}.*-cpushm_*"):
        shared.unlink(missing_ok=True)


@cache
def use(folder: Path) -> None:
    """Have this process of an engine name by the folder what it shares."""

    def name() -> str:
        return f"{folder.name}.{secrets.token_hex(8)}"

    def change(executor: ModuleType) -> None:
        # The last part is also the beginning of the name of the workers' shared memory.
        executor.__dict__["get_file_store_init_method"] = lambda: f"file://{folder}/{name()}"

    changed: Any = shared_memory
    changed._make_filename = lambda: f"/{name()}"
    after_import(_EXECUTORS, change)
