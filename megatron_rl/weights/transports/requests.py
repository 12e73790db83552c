"""Versions on request: how a generator's workers and a sender of the trainer agree on a transfer.

Below the run's prefix in torchrun's store, for sender `s` and engine `e`; `n` counts the engine's
requests from 0, and every value is JSON:

    s/e/request/n       worker 0 of the engine: {"version": 21}; {} ends the sender's service
    s/e/answer/n        sender: what the workers must know of what it is going to send
    s/e/ready/n/w       worker w: {}, once it has agreed to that
    s/e/go/n            sender: {}: every worker is ready, the bytes travel now
    s/e/verdict/n/w     worker w: {}, once it has checked every byte

From `answer` on, {"error": "..."} may stand in the place of each: a transfer ends for all at once.

One thread of the sender serves one engine, so engines do not wait for each other, and the trainer
waits for none of them. A sender holds what it offers in memory of its own: training goes on.
Every wait ends after `timeouts.transfer_seconds`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.rendezvous import Rendezvous

CLOSE_SECONDS = 10.0
"""How long the end of a service waits for a transfer that is under way."""
_ONE_YEAR = 365 * 24 * 3600.0


@dataclass(slots=True)
class Request:
    """One request for a version, seen from either side."""

    store: Any
    base: str
    """`s/e/` of the key names."""
    number: int
    version: int
    deadline: float
    """Moment (`time.monotonic`) at which every wait of it ends."""

    @property
    def seconds_left(self) -> float:
        """Until the deadline; a millisecond at least."""
        return max(self.deadline - time.monotonic(), 0.001)

    def put(self, what: str, value: dict[str, Any]) -> None:
        """Say something under `what`."""
        self.store.set(f"{self.base}{what}", json.dumps(value))

    def get(self, what: str, who: str) -> dict[str, Any]:
        """What was said under `what`.

        Raises:
            WeightsError: nothing until the deadline, or an error; `who` is named.
        """
        from torch.distributed import DistStoreError

        key = f"{self.base}{what}"
        try:
            self.store.wait([key], timedelta(seconds=self.seconds_left))
        except DistStoreError:
            raise WeightsError(
                f"weights version {self.version}: {who} said nothing within"
                " timeouts.transfer_seconds; its log may say why"
            ) from None
        found: dict[str, Any] = json.loads(self.store.get(key))
        if "error" in found:
            raise WeightsError(f"weights version {self.version}, {who}: {found['error']}")
        return found


class Background:
    """A function at work in a thread that never keeps the process from ending."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:  # noqa: BLE001 - kept for `done`, which raises it
            self._error = e

    @property
    def ended(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def done(self) -> bool:
        """Whether it has ended; raises what it ended with."""
        if not self.ended:
            return False
        if self._error is not None:
            raise self._error
        return True

    def join(self, seconds: float) -> None:
        """Wait for its end, this long at most."""
        self._thread.join(seconds)


class Service:
    """A sender's side of the requests of one engine.

    Args:
        rendezvous: the run's store.
        sender: trainer rank that sends.
        engine: number of the engine.
        workers: worker processes of the engine.
        seconds: time-out of one request.
        offer: (version) -> the answer to its request; raises `WeightsError` for one that is gone.
        send: sends the bytes; it is called when every worker is ready.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        sender: int,
        engine: int,
        workers: int,
        seconds: float,
        offer: Callable[[int], dict[str, Any]],
        send: Callable[[Request], None],
    ) -> None:
        self._rendezvous, self._engine, self._workers = rendezvous, engine, workers
        self._base = f"{sender}/{engine}/"
        self._seconds, self._offer, self._send = seconds, offer, send
        self._failures: list[WeightsError] = []
        self._number = 0
        self._thread = Background(self._serve, f"weights for generator {engine}")

    def raise_if_failed(self) -> None:
        """Raise the first failure since the last call.

        Raises:
            WeightsError: a version did not reach the engine; named with the cause.
        """
        self._thread.done()
        if self._failures:
            failure, self._failures = self._failures[0], []
            raise failure

    def close(self) -> None:
        """End the service; where the store is gone, it has ended with it."""
        if self._thread.ended:
            return
        store = self._rendezvous.connect(CLOSE_SECONDS)
        store.set(f"{self._base}request/{self._number}", "{}")
        self._thread.join(CLOSE_SECONDS)

    def _serve(self) -> None:
        store = self._rendezvous.connect(self._seconds)
        while True:
            key = f"{self._base}request/{self._number}"
            store.wait([key], timedelta(seconds=_ONE_YEAR))
            asked = json.loads(store.get(key))
            if not asked:
                return
            deadline = time.monotonic() + self._seconds
            request = Request(store, self._base, self._number, asked["version"], deadline)
            self._number += 1
            try:
                self._answer(request)
            except RuntimeError as e:  # of gloo, NCCL, the store, or a WeightsError
                self._failures.append(
                    WeightsError(
                        f"weights version {request.version} did not reach generator"
                        f" {self._engine}: {e}"
                    )
                )

    def _answer(self, request: Request) -> None:
        n, said = request.number, f"answer/{request.number}"
        try:
            request.put(said, self._offer(request.version))
            said = f"go/{n}"
            self._hear(request, "ready")
        except WeightsError as e:
            request.put(said, {"error": str(e)})
            raise
        request.put(said, {})
        try:
            self._send(request)
        except RuntimeError as e:
            # A worker that refuses leaves at once; its reason says more than a closed connection.
            self._hear(request, "verdict", only_said=True)
            raise WeightsError(f"the transfer broke off: {e}") from e
        self._hear(request, "verdict")

    def _hear(self, request: Request, what: str, *, only_said: bool = False) -> None:
        for worker in range(self._workers):
            key = f"{what}/{request.number}/{worker}"
            if not only_said or request.store.check([f"{request.base}{key}"]):
                request.get(key, f"worker {worker}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a version is received: one worker of one engine."""

    rendezvous: Rendezvous
    """The run's store."""
    engine: int
    worker: int
    """Number of this worker in the engine."""
    workers: int
    """Worker processes of the engine."""
    seconds: float
    """Time-out of one transfer, `timeouts.transfer_seconds`."""

    @property
    def rank(self) -> int:
        """In the group of a transfer, where the sender is rank 0."""
        return 1 + self.worker

    @property
    def ranks(self) -> int:
        """Of that group."""
        return 1 + self.workers


class Requests:
    """A worker's side of its engine's requests to one sender.

    Args:
        place: of the worker.
        sender: trainer rank that sends.
    """

    def __init__(self, place: Place, sender: int) -> None:
        self._place = place
        self._base, self._who = f"{sender}/{place.engine}/", f"trainer rank {sender}"
        self._store: Any = None
        self._number = 0

    def take(
        self,
        version: int,
        agree: Callable[[dict[str, Any]], None],
        receive: Callable[[Request], None],
    ) -> None:
        """One transfer, as one of the engine's workers, which all call this.

        Args:
            version: what is asked for.
            agree: looks at the sender's answer; raises `WeightsError` to refuse it.
            receive: receives and checks the bytes.

        Raises:
            WeightsError: either side refused, or was not heard of in time.
        """
        if self._store is None:
            self._store = self._place.rendezvous.connect(self._place.seconds)
        deadline = time.monotonic() + self._place.seconds
        request = Request(self._store, self._base, self._number, version, deadline)
        self._number += 1
        if self._place.worker == 0:
            request.put(f"request/{request.number}", {"version": version})
        answer = request.get(f"answer/{request.number}", self._who)
        with self._telling(request, "ready"):
            agree(answer)
        request.get(f"go/{request.number}", self._who)
        with self._telling(request, "verdict"):
            receive(request)

    @contextmanager
    def _telling(self, request: Request, what: str) -> Iterator[None]:
        key = f"{what}/{request.number}/{self._place.worker}"
        try:
            yield
        except RuntimeError as e:
            request.put(key, {"error": str(e)})
            raise
        request.put(key, {})
