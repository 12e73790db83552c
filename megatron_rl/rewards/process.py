"""The pool's end of a worker process: start it, speak with it, kill it whole."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_rl.rewards.protocol import HEADER, body_length, frame
from megatron_rl.rewards.verifier_settings import VerifierSettings
from megatron_rl.rewards.worker import Start

PACKAGE_ROOT = Path(__file__).parents[2]


class WorkerProcess:
    """A nursery and its child in a process group of their own, at the other end of a socket."""

    def __init__(self, settings: VerifierSettings, kinds: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        self.socket = ours
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `kill`
        path = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), *([path] if path else [])]),
            "PYTHONHASHSEED": "0",  # sympy's orders, and with them verdicts, repeat
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.rewards.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        start = Start(settings=settings.model_dump_json(), kinds=kinds)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the first read says so
            self.socket.sendall(frame(start))

    @property
    def pid(self) -> int:
        """Process id of the nursery, which leads the process group."""
        return self._process.pid

    @property
    def child_pids(self) -> list[int]:
        """Process ids of the nursery's children."""
        try:
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return [int(pid) for pid in text.split()]

    def killed_by_signal(self) -> bool:
        """Whether a worker whose connection broke was killed, rather than ended by itself."""
        try:
            return self._process.wait(timeout=2) < 0
        except subprocess.TimeoutExpired:
            return False

    def kill(self) -> str:
        """Kill nursery and child, and return the end of what they wrote to standard error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        self.socket.close()
        if self._errors.closed:
            return ""
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        self._errors.close()
        return text[-2000:].strip()

    def forget(self) -> None:
        """Let go of it in a forked process, to which it does not belong."""
        self.socket.close()
        self._process.returncode = 0  # not ours to wait for


def receive(connection: socket.socket) -> bytes:
    """Body of the next frame on a blocking socket with a time-out.

    Raises:
        EOFError: the worker is gone.
        TimeoutError: nothing came in time.
    """
    return _exactly(connection, body_length(_exactly(connection, HEADER.size)))


def _exactly(connection: socket.socket, size: int) -> bytes:
    out = bytearray()
    while len(out) < size:
        try:
            part = connection.recv(min(size - len(out), 1 << 20))
        except ConnectionResetError:
            part = b""
        if not part:
            raise EOFError
        out += part
    return bytes(out)
