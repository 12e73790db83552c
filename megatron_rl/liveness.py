"""Signs of life of a run's ranks, which `megatron-rl alive` reads.

    <node folder>/<run>_<local rank>.json   the last sign of each rank of the node that has work
    <output_dir>/alive.json                 that of rank 0, for other nodes

A rank signs where it makes progress (a step, a completion, a checkpoint), never from a thread that
would go on while the rank hangs. A sign says when the next one is due: the run's own time-outs of
what the rank begins (`BOUNDS`), and `timeouts.shutdown_seconds`. A wait that times out thus ends
the run with its cause before a probe does.
"""

import contextlib
import hashlib
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from megatron_rl.files import replace_file

if TYPE_CHECKING:
    from megatron_rl.config import RunConfig

FOLDER = "MEGATRON_RL_ALIVE_DIR"  # the node folder; else one of the user among temporary files
_ANY_WAIT = ("batch_seconds", "evaluation_seconds", "startup_seconds")  # of the control group
# State of a rank -> time-outs of the configuration within which it ends or is signed again.
BOUNDS: dict[str, tuple[str, ...]] = {
    "starting": ("startup_seconds",),
    "loading": _ANY_WAIT,
    "training": ("batch_seconds", "startup_seconds"),  # the wait for a batch, and its step
    "saving": _ANY_WAIT,
    "evaluating": ("evaluation_seconds",),
    "generating": ("batch_seconds", "startup_seconds"),
    "waiting": ("startup_seconds",),  # a generator without work
    "ended": (),
}
GONE_SECONDS = 60.0  # a trainer that is gone for so long is over, unless torchrun starts it again
_INTERVAL, _RETRY = 1.0, 60.0  # seconds between writes, and after one that failed


class Sign(msgspec.Struct, kw_only=True):
    """Last act of a rank."""

    run: str  # the run's `output_dir`, absolute
    role: str
    rank: int
    host: str
    pid: int
    born: int  # start of the process in ticks of the kernel: another process may get its number
    incarnation: int  # times that torchrun had restarted the ranks
    state: str = "starting"
    step: int = 0  # optimizer steps of the run, or the version of the generator's weights
    time: float = 0.0  # seconds since 1970
    limit: float = 0.0  # seconds from there to the next sign at most, unless the rank has ended

    def late(self) -> bool:
        """Return True if the next sign is overdue."""
        return self.state != "ended" and time.time() - self.time > self.limit

    def gone(self) -> bool:
        """Return True if the process was on this host and is no more."""
        return self.host == socket.gethostname() and not self.process()

    def over(self) -> bool:
        """Return True if the rank has ended, is overdue, or is gone for `GONE_SECONDS`."""
        lasting = time.time() - self.time > GONE_SECONDS
        return self.state == "ended" or self.late() or (lasting and self.gone())

    def process(self) -> str:
        """Return the kernel's letter for the state of the process (`T`: stopped); "" if gone."""
        state, born = _process(self.pid)
        return state if born == self.born and state not in "ZX" else ""


class _Signer:
    def __init__(self, config: "RunConfig", role: str, rank: int) -> None:
        run, host, pid = config.output_dir.resolve(), socket.gethostname(), os.getpid()
        self._timeouts, self._next_write = config.timeouts, 0.0
        restarts, born = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), _process(pid)[1]
        self._sign = Sign(run=str(run), role=role, rank=rank, host=host, pid=pid, born=born,
                          incarnation=restarts)  # fmt: skip
        folder = node_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, old in signs(folder).items():
            # Local ranks may have other roles now. Another run's may be about to start again.
            over = old is None or old.state == "ended" or old.late() or old.run == str(run)
            if over and not (old and old.process()):
                path.unlink(missing_ok=True)
        name = f"{run_prefix(run)}{os.environ.get('LOCAL_RANK', rank)}.json"
        self._paths = [folder / name, *([run / "alive.json"] if rank == 0 else [])]
        self._paths[-1].parent.mkdir(parents=True, exist_ok=True)

    def sign(self, state: str, step: int | None) -> None:
        s, now, names = self._sign, time.time(), ("shutdown_seconds", *BOUNDS[state])
        if now < self._next_write and state in (s.state, "waiting"):
            return
        s.state, s.time, s.step = state, now, s.step if step is None else step
        s.limit, self._next_write = sum(getattr(self._timeouts, n) for n in names), now + _INTERVAL
        try:
            for path in self._paths:
                replace_file(path, msgspec.json.encode(s), durable=False)
        except OSError as e:
            print(f"warning: megatron-rl alive will not see this rank: {e}", file=sys.stderr)
            self._next_write = now + _RETRY


_signer: _Signer | None = None


def begin(config: "RunConfig", role: str, rank: int) -> None:
    """Sign as this rank of a run (`trainer`, `generator`) from now on; call it early.

    Raises:
        OSError: the node folder or `output_dir` cannot be written.
    """
    global _signer
    try:
        _signer = _Signer(config, role, rank)
    except OSError as e:
        raise OSError(f"{e}: set {FOLDER} to a folder that this user can write") from e
    sign("starting")


def sign(state: str, step: int | None = None) -> None:
    """Sign that the rank begins a state or goes on with it; without `begin`, nothing happens."""
    if _signer is not None:
        _signer.sign(state, step)


def node_folder() -> Path:
    """Return the folder of this node's signs; it may not exist."""
    default = Path(tempfile.gettempdir(), f"megatron_rl_{os.getuid()}")
    return Path(os.environ.get(FOLDER) or default)


def run_prefix(run: Path) -> str:
    """Return what the names of a run's files in the node folder begin with."""
    return f"{hashlib.blake2s(str(run).encode(), digest_size=6).hexdigest()}_"


def signs(folder: Path, names: str = "*.json") -> dict[Path, Sign | None]:
    """Return the signs in a folder by file; None for a file that holds none."""
    files: dict[Path, Sign | None] = dict.fromkeys(sorted(folder.glob(names)))
    for path in files:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            files[path] = msgspec.json.decode(path.read_bytes(), type=Sign)
    return files


def born(pid: int) -> int:
    """Return the start of a process in ticks of the kernel, which names it for good; -1: gone."""
    state, ticks = _process(pid)
    return -1 if state in ("", "Z", "X") else ticks


def _process(pid: int) -> tuple[str, int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", -1
    return fields[0], int(fields[19])
