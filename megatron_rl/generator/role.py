"""`megatron-rl generate`: the process of one generator, started by hand, a scheduler or a rank."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from megatron_rl import compat, liveness
from megatron_rl.compat import upstream, vllm_fixes
from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.generator.cpu_attention import check_head_size
from megatron_rl.generator.process_environment import prepare_environment
from megatron_rl.generator.serve import Generator, OtherEngineError
from megatron_rl.generator.supervisor import EngineRecord, engine_name
from megatron_rl.run_lock import ENDPOINT_FILE

OTHER_ENGINE_STATUS = 75
"""Exit status of a process whose engine does not fit the run any more: start it again."""
_AGENT_SECONDS = 1.0  # between two looks at torchrun's process
_AGENT_GRACE_SECONDS = 25.0  # from its end to the end of this one


def run_generator(join: str, name: str = "", agent: int = 0, record: int = -1) -> None:
    """Serve a run as a generator until it ends, this process is asked to leave, or an error.

    Args:
        join: as for `address_of`.
        name: of the generator; empty: one that no other process has.
        agent: the process of torchrun with which this one ends; 0: none.
        record: descriptor of the file by which ranks of torchrun know this process; -1: none.

    Raises:
        ConfigError: a name that does not show what it is of.
        UnsupportedVersionError: a release of vLLM that may have faults.
        SystemExit: the run has other settings now (`OTHER_ENGINE_STATUS`), or a signal.
        Exception: the error that ended the role, after it was reported as `Failed`.
    """
    host, pid = socket.gethostname(), os.getpid()
    name = name or f"{engine_name(host)}-{secrets.token_hex(3)}"
    if not name.startswith(engine_name("")):
        raise ConfigError(f"--name {name}: a generator's name begins with {engine_name('')!r}")
    book = EngineRecord(record, agent)
    book.write()
    if agent:
        threading.Thread(target=_end_with, args=(agent,), daemon=True).start()
    index = _number(name)
    rank = int(os.environ.get("RANK", index))

    def prepare(config: RunConfig, model_dir: str) -> None:
        compat.collect_rarely()
        liveness.begin(config, "generator", rank)
        check_head_size(Path(model_dir))
        prepare_environment(config, model_dir)

    def ready() -> None:
        compat.collect_as_usual()
        book.write(ready=True)

    with _recorded(book, name):
        upstream.check(vllm_fixes.FIXES)
        generator = Generator(
            address_of(join),
            name,
            index,
            rank,
            f"process {pid} on {host}",
            supervised=bool(agent),
            prepare=prepare,
            ready=ready,
            show_life=book.touch,
        )
        _let_signals_ask(generator)
        asyncio.run(generator.run())
        liveness.sign("ended")


@contextlib.contextmanager
def _recorded(book: EngineRecord, name: str) -> Iterator[None]:
    """Record the end of the process; one that needs another engine ends with its own status."""
    try:
        yield
        book.write(status=0)
    except SystemExit as e:  # by a signal
        liveness.sign("ended")
        book.write(status=e.code)
        raise
    except OtherEngineError as e:
        book.write(status=OTHER_ENGINE_STATUS, error=str(e))
        print(f"{name}: {e}", file=sys.stderr, flush=True)
        sys.exit(OTHER_ENGINE_STATUS)
    except Exception as e:
        error = "\n".join([f"{type(e).__name__}: {e}", *getattr(e, "__notes__", ())])
        book.write(status=1, error=error)
        raise


def address_of(join: str) -> str | Path:
    """Return an orchestrator's address, or its file: of `HOST:PORT`, an `output_dir`, a file."""
    host, _, port = join.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        return f"tcp://{join}"
    path = Path(join)
    return path if path.is_file() else path / ENDPOINT_FILE


def _number(name: str) -> int:
    """Return the number of an engine: that in its name, or one made of it."""
    last = name.rpartition("-")[2]
    if last.isdigit() and name == engine_name(last):
        return int(last)
    return 1_000_000 + zlib.crc32(name.encode()) % 1_000_000_000


def _let_signals_ask(generator: Generator) -> None:
    """Let the first SIGTERM or SIGINT ask the generator to leave, and the next end it at once."""
    signals = list[int]()

    def ask(number: int, _: object) -> None:
        signals.append(number)
        if len(signals) > 1 or not generator.leave():
            sys.exit(128 + number if len(signals) > 1 else 0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)


def _end_with(agent: int) -> None:
    """Ask this process to leave once torchrun is gone, and kill it if it does not end."""
    born = liveness.born(agent)
    while born >= 0 and liveness.born(agent) == born:
        time.sleep(_AGENT_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_AGENT_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
