"""The error that ends an engine, from the process of it that has the error.

vLLM logs it there, and all that it tells the engine's client is `EngineDeadError`.
"""

import contextlib
import logging
import os
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path

FILE = "MEGATRON_RL_ENGINE_ERRORS"
"""Environment variable: file in which the processes of a generator's engine write their errors."""
LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
"""vLLM's loggers of errors that end a process: of an engine, and of its workers."""
LONGEST = 800  # characters of an error that are kept


def open_file() -> None:
    """Make a file for the errors, which ends with this process."""
    os.environ[FILE] = f"/proc/{os.getpid()}/fd/{os.memfd_create('engine_errors')}"


def write_errors() -> None:
    """Have this process of an engine write the errors that vLLM logs; safe to repeat."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_write)  # vLLM's logging set-up replaces handlers


def cause(processes: Iterable[BaseProcess]) -> str:
    """Return the first error that was written, else how processes of the engine ended, or ""."""
    errors = Path(os.environ.get(FILE, os.devnull)).read_text().splitlines()
    ends = [f"{p.name} ended with exit status {p.exitcode}" for p in processes if p.exitcode]
    return f"The engine's first error: {error}" if (error := ", ".join(errors[:1] or ends)) else ""


def _write(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if record.levelno >= logging.ERROR:
        text = record.getMessage() if error is None else f"{type(error).__name__}: {error}"
        with contextlib.suppress(KeyError, OSError), open(os.environ[FILE], "a") as file:
            file.write(" ".join(text.split())[:LONGEST] + "\n")
    return True
