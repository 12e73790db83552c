"""The pool's end of a worker process: start it, send it requests, kill it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from megatron_rl.rewards.base import VerifierDown
from megatron_rl.rewards.verifier_settings import VerifierSettings
from megatron_rl.rewards.worker import Reply, Request, encode, receive, wall_limit

PACKAGE_ROOT = Path(__file__).parents[2]
GRACE_SECONDS = 5.0
"""A worker that has not killed itself this long after its limit is killed."""
_decode = msgspec.msgpack.Decoder(Reply).decode


class WorkerLost(RuntimeError):
    """The connection to a worker broke; another worker can take the request."""


class WorkerProcess:
    """A fork server and its child in a process group of their own, and the socket to them.

    One thread at a time may use it; `kill` is safe from any other.
    """

    def __init__(self, settings: VerifierSettings, kinds: tuple[str, ...]) -> None:
        self.settings, self.kinds = settings, kinds
        self.spawn()

    def spawn(self) -> None:
        """Start a process, which is usable after `wait_ready`."""
        self._socket, theirs = socket.socketpair()
        self._stream = self._socket.makefile("rb")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        paths = [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONHASHSEED": "0",  # for a fixed order of sympy's terms, and with it fixed verdicts
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        fd, settings = theirs.fileno(), self.settings.model_dump_json()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.rewards.worker", str(fd), settings, *self.kinds],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id of the fork server, which leads the process group."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until it can verify; `VerifierDown` if it cannot, `WorkerLost` if it was killed."""
        self._socket.settimeout(self.settings.start_seconds)
        try:
            reply = _decode(receive(self._stream))
        except TimeoutError:
            raise VerifierDown(
                f"a verifier worker did not start within {self.settings.start_seconds:g} s"
                f" (verifier.start_seconds)\n{self._end()}"
            ) from None
        except (EOFError, OSError, msgspec.DecodeError) as e:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self._process.wait(timeout=2) < 0:
                    raise WorkerLost("a worker was killed while it started") from None
            raise VerifierDown(f"a verifier worker did not start: {e}\n{self._end()}") from None
        if reply.status == "down":
            raise VerifierDown(reply.reason)

    def ask(self, request: Request) -> Reply:
        """Return the worker's reply to a request; `WorkerLost` if none comes within its limits."""
        limit = wall_limit(self.settings, request[0]) + GRACE_SECONDS
        self._socket.settimeout(limit)
        try:
            self._socket.sendall(encode(request))
            return _decode(receive(self._stream))
        except TimeoutError:
            raise WorkerLost(f"a worker did not answer within {limit:g} s") from None
        except (EOFError, OSError, msgspec.DecodeError) as e:
            raise WorkerLost(f"the connection to a worker broke ({type(e).__name__})") from None
        except BaseException:
            self.kill()  # a reply may still come: this connection must not be used again
            raise

    def kill(self) -> None:
        """Kill fork server and child, and end a wait for their reply."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Kill the worker and close what belongs to it."""
        self.kill()
        self._stream.close()
        self._socket.close()
        self._errors.close()

    def forget(self) -> None:
        """Close this process's copy of the socket: after a fork the worker is the parent's."""
        if (fd := self._socket.detach()) >= 0:
            os.close(fd)
        self._process.returncode = 0  # not this process's child

    def _end(self) -> str:
        """Kill the worker and return the end of its standard error."""
        self.kill()
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:].strip()
