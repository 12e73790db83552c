"""Megatron-Core's distributed checkpoint without a helper process, on CPU and CUDA alike.

The writer of `megatron.core.dist_checkpointing` passes its results through a queue of a spawned
`multiprocessing.Manager`, for asynchronous saves. A synchronous save writes in this process, where
the manager only costs: seconds at the first save, a re-import of the main script (which must guard
its main part), and an orphan that keeps stdout open when a rank is killed.
"""

from __future__ import annotations

import queue

EVIDENCE = "_results_queue = ctx.Manager().Queue()"
"""Text in `megatron.core.dist_checkpointing.strategies.filesystem_async` that requires this."""


def write_in_process() -> None:
    """Let synchronous saves of this process use an ordinary queue; safe to repeat."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
