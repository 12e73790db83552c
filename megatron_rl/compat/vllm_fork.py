"""Forked processes of vLLM on a CPU: an engine starts in 2 s instead of 13 s.

vLLM's CPU platform has them spawned, for another OpenMP library and bound cores, which processes of
one thread do not need, and each imports vLLM again. Elsewhere vLLM forks by default.
"""

import gc
import os
from collections.abc import Callable
from functools import cache
from multiprocessing.context import ForkContext, ForkProcess
from types import ModuleType

from packaging.specifiers import SpecifierSet

from megatron_rl.compat.import_hook import Change, after_import

RELEASES = "==0.32.*"
"""Releases of vLLM whose processes can be forked; in any other one they are spawned."""
EVIDENCE = {"vllm.platforms.cpu": 'os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"'}
"""Module -> text of its source without which the change is no longer needed."""
_MODULES = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")


def install(prepare: Callable[[], None]) -> None:
    """Let vLLM fork the processes of its engines; safe to repeat, before or after its import.

    Each process calls `prepare` first: vLLM loads its plug-ins once, before the fork.
    """
    after_import(_MODULES, _change(prepare))


@cache
def _change(prepare: Callable[[], None]) -> Change:
    class _Process(ForkProcess):
        def run(self) -> None:
            gc.freeze()  # the parent's garbage: a Gloo group of it waits forever for its threads
            prepare()
            if os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # torch read it before the fork
                import torch

                torch.compiler.set_stance("force_eager")
            super().run()

    class _Context(ForkContext):
        Process = _Process

    def change(module: ModuleType) -> None:
        import vllm

        if SpecifierSet(RELEASES).contains(vllm.__version__, prereleases=True):
            module.__dict__["get_mp_context"] = _Context

    return change
