"""vLLM's processes as forks on a CPU: an engine starts in 2 s instead of 13 s.

vLLM's CPU platform has them spawned, for another OpenMP library and bound cores, which processes of
one thread do not need, and each imports vLLM again. Elsewhere vLLM forks by default.
"""

from __future__ import annotations

import multiprocessing.context
from types import ModuleType

from megatron_rl.compat.import_hook import after_import
from megatron_rl.generator.vllm_plugin import register

_MODULES = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")


class _Process(multiprocessing.context.ForkProcess):
    def run(self) -> None:
        register()  # shields this process; vLLM loads its plug-ins once, before the fork
        super().run()


class _Context(multiprocessing.context.ForkContext):
    Process = _Process


def install() -> None:
    """Let vLLM fork the processes of its engines; safe to repeat, before or after its import."""
    after_import(_MODULES, _change)


def _change(module: ModuleType) -> None:
    module.__dict__["get_mp_context"] = _Context
