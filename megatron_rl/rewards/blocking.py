"""One worker for code that is not asynchronous: any thread, any process, one verdict at a time."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from typing import Any

from megatron_rl.rewards.base import Outcome, Verdict, VerifierDown
from megatron_rl.rewards.process import WorkerProcess, receive
from megatron_rl.rewards.protocol import Garbled, Request, frame, read_response
from megatron_rl.rewards.verifier_settings import VerifierSettings

TRIES = 5
GRACE_SECONDS = 5.0
OWN_LIMITS = {signal.SIGPROF: "CPU time", signal.SIGALRM: "time"}


class BlockingVerifier:
    """A worker process behind a lock; it starts at the first verdict and is replaced when it dies.

    Args:
        settings: limits.
        kinds: task kinds.
    """

    def __init__(self, settings: VerifierSettings, kinds: tuple[str, ...]) -> None:
        self.settings, self.kinds = settings, kinds
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._next_id = 0
        # A forked process must neither share the connection nor wait for a lock that a thread of
        # its parent held.
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.close)

    def verify(
        self, kind: str, completion: str, gold: str, meta: dict[str, Any] | None = None
    ) -> Verdict:
        """The verdict on a completion.

        Raises:
            VerifierDown: the worker cannot start or died again and again.
        """
        with self._lock:
            for _ in range(TRIES):
                verdict = self._try(kind, completion, gold, meta or {})
                if verdict is not None:
                    return verdict
                self._drop()
        raise VerifierDown(f"the verifier's worker died {TRIES} times on one answer")

    def close(self) -> None:
        """Stop the worker; the next verdict starts a new one."""
        with self._lock:
            self._drop()

    def _try(self, kind: str, completion: str, gold: str, meta: dict[str, Any]) -> Verdict | None:
        process = self._process or self._start()
        self._next_id += 1
        request = Request(id=self._next_id, kind=kind, completion=completion, gold=gold, meta=meta)
        limit = self.settings.wall_seconds + GRACE_SECONDS
        process.socket.settimeout(
            limit + (self.settings.sandbox.total_seconds + 10) * (kind == "code")
        )
        try:
            process.socket.sendall(frame(request))
            response = read_response(receive(process.socket))
        except (EOFError, OSError, Garbled):  # OSError: the time-out as well
            return None
        if response.verdict is not None:
            return response.verdict
        if response.status == "bug":
            return Verdict(Outcome.UNPARSABLE, f"error of the verifier: {response.reason}")
        if response.status == "down":
            self._drop()
            raise VerifierDown(response.reason)
        by = signal.Signals(response.signal)
        if by in OWN_LIMITS:
            return Verdict(Outcome.TIMED_OUT, f"over the {OWN_LIMITS[by]} limit of a verdict")
        return None

    def _start(self) -> WorkerProcess:
        process = WorkerProcess(self.settings, self.kinds)
        process.socket.settimeout(self.settings.start_seconds)
        try:
            response = read_response(receive(process.socket))
        except (EOFError, OSError, Garbled) as e:
            raise VerifierDown(
                f"the verifier's worker did not start ({type(e).__name__})\n{process.kill()}"
            ) from None
        if response.status == "down":
            process.kill()
            raise VerifierDown(response.reason)
        self._process = process
        return process

    def _drop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _forked(self) -> None:
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.forget()
            self._process = None
