"""The `vllm.general_plugins` entry point: vLLM calls `register` in each of its processes.

It runs in every vLLM of the environment, also in one that has nothing to do with this package, so
it adds a weight-transfer backend and fixes known faults, and nothing else. Only processes of a
generator's engine are also shielded from the signals of its terminal.
"""

import ctypes
import multiprocessing
import os
import signal
from pathlib import Path

from megatron_rl.compat import upstream, vllm_fixes
from megatron_rl.generator import engine_errors, engine_folder

WEIGHT_TRANSFER_BACKEND = "megatron_rl"
"""Name under which vLLM finds `weight_transfer.StoredWeights`."""
ENGINE_OWNER = "MEGATRON_RL_ENGINE_OWNER"
"""Environment variable: process id of the generator whose engine a process belongs to."""
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Register the backend, and the fixes in a known release; may be called any number of times."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    try:
        upstream.check(vllm_fixes.FIXES)
    except upstream.UnsupportedVersionError:
        # A generator's engine must not run so; another user's vLLM may.
        if os.environ.get(ENGINE_OWNER):
            raise
    else:
        upstream.install(vllm_fixes.FIXES)
    if WEIGHT_TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER_BACKEND, "megatron_rl.generator.weight_transfer", "StoredWeights"
        )
    if folder := os.environ.get(engine_folder.FOLDER):
        engine_folder.use(Path(folder))
    if os.environ.get(ENGINE_OWNER) and multiprocessing.parent_process() is not None:
        # Ctrl-C and torchrun signal whole process groups, and vLLM's processes end at the first
        # SIGINT; the run needs them until the orchestrator sends Stop. In a process group of their
        # own they get no such signal, so the kernel must end them when their parent is gone.
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        engine_errors.write_errors()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
