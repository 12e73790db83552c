"""What fails as a process of vLLM's does; a spawned process imports this module and little else."""

from __future__ import annotations

import logging
import os
import signal

from megatron_rl.generator import engine_errors


def fails(number: int, *, kills: bool = False) -> None:
    """Fail as a process of vLLM's does: the error is logged, and does not leave the process."""
    engine_errors.write_errors()
    engine_errors.write_errors()
    if kills:
        os.kill(os.getpid(), signal.SIGKILL)
    logger = logging.getLogger(engine_errors.LOGGERS[number])
    try:
        raise MemoryError("40 GiB\nwanted" + 2000 * "." if number else "engine")
    except MemoryError:
        logger.warning("nothing")
        logger.exception("WorkerProc hit an exception.")
