"""Megatron-Core's distributed checkpoint without a helper process, on CPU and CUDA alike.

The writer of `megatron.core.dist_checkpointing` hands its results over a queue of a spawned
`multiprocessing.Manager`, for asynchronous saves. A synchronous save writes in this process, and
then the manager only costs: seconds at the first save, a re-import of the main script (which must
guard its main part), and an orphan that keeps stdout open when a rank is killed.
"""

from __future__ import annotations

import queue

EVIDENCE = "_results_queue = ctx.Manager().Queue()"
"""Text in `megatron.core.dist_checkpointing.strategies.filesystem_async` that calls for this."""


def write_in_process() -> None:
    """Lets synchronous saves of this process use an ordinary queue; safe to repeat.

    Raises:
        RuntimeError: this release of Megatron-Core keeps the queue elsewhere.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if not hasattr(filesystem_async, "_results_queue"):
        raise RuntimeError(
            "megatron.core.dist_checkpointing.strategies.filesystem_async has no _results_queue:"
            " compat.megatron_checkpoint was written for megatron-core 0.19"
        )
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
