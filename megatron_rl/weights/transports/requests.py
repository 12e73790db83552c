"""Transfers on request: how an engine's workers and a sender of the trainer agree on one.

Below the run's prefix in torchrun's store, for sender `s` and engine `e`; `n` counts the engine's
requests from 0, and every value is JSON:

    s/e/request/n       worker 0 of the engine: {"version": 21}; {} ends the sender's service
    s/e/answer/n        sender: the facts that the workers need about the bytes to come
    s/e/ready/n/w       worker w: {}, once it has agreed to that
    s/e/go/n            sender: {}: every worker is ready, the bytes travel now
    s/e/verdict/n/w     worker w: {}, once it has checked every byte

From `answer` on, each value may be {"error": "..."} instead: a transfer ends for all at once.

One thread of the sender serves one engine, so the trainer waits for none of them, nor, by `gloo`,
does an engine for another. A sender holds the versions that it offers in its own memory, so
training continues. Every wait ends after `timeouts.transfer_seconds`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.rendezvous import Rendezvous

CLOSE_SECONDS = 10.0
"""Longest wait of a closing service for a transfer that is still running."""
_ONE_YEAR = 365 * 24 * 3600.0


@dataclass(slots=True)
class TransferRequest:
    """One request for a version, as either side sees it."""

    store: Any
    base: str
    """`s/e/` of the key names."""
    number: int
    version: int
    deadline: float
    """Moment (`time.monotonic`) at which every wait of it ends."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; a millisecond at least."""
        return max(self.deadline - time.monotonic(), 0.001)

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Write a value under `base` + `key`."""
        self.store.set(f"{self.base}{key}", json.dumps(value))

    def get(self, key: str, writer: str) -> dict[str, Any]:
        """Wait for the value under `base` + `key` and return it.

        Raises:
            WeightsError: nothing until the deadline, or an error; `writer` is named.
        """
        from torch.distributed import DistStoreError

        full = f"{self.base}{key}"
        try:
            self.store.wait([full], timedelta(seconds=self.seconds_left))
        except DistStoreError:
            raise WeightsError(
                f"weights version {self.version}: {writer} said nothing within"
                " timeouts.transfer_seconds; its log may say why"
            ) from None
        value: dict[str, Any] = json.loads(self.store.get(full))
        if "error" in value:
            raise WeightsError(f"weights version {self.version}, {writer}: {value['error']}")
        return value


def in_background[T](work: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a thread, which never keeps the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as e:  # noqa: BLE001 - kept for `result`, which raises it
            future.set_exception(e)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class TransferService:
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
        send: Callable[[TransferRequest], None],
    ) -> None:
        self._rendezvous, self._engine, self._workers = rendezvous, engine, workers
        self._base = f"{sender}/{engine}/"
        self._seconds, self._offer, self._send = seconds, offer, send
        self._failures: list[WeightsError] = []
        self._number = 0
        self._service = in_background(self._serve, f"weights for generator {engine}")

    def raise_if_failed(self) -> None:
        """Raise the first failure since the last call: a version did not reach the engine."""
        if self._service.done():
            self._service.result()
        if self._failures:
            failure, self._failures = self._failures[0], []
            raise failure

    def close(self) -> None:
        """End the service; if the store is gone, it has ended already."""
        if self._service.done():
            return
        store = self._rendezvous.connect(CLOSE_SECONDS)
        store.set(f"{self._base}request/{self._number}", "{}")
        futures.wait([self._service], CLOSE_SECONDS)

    def _serve(self) -> None:
        store = self._rendezvous.connect(self._seconds)
        while True:
            key = f"{self._base}request/{self._number}"
            store.wait([key], timedelta(seconds=_ONE_YEAR))
            value = json.loads(store.get(key))
            if not value:
                return
            deadline = time.monotonic() + self._seconds
            request = TransferRequest(store, self._base, self._number, value["version"], deadline)
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

    def _answer(self, request: TransferRequest) -> None:
        n, next_key = request.number, f"answer/{request.number}"
        try:
            request.put(next_key, self._offer(request.version))
            next_key = f"go/{n}"
            self._await_workers(request, "ready")
        except WeightsError as e:
            request.put(next_key, {"error": str(e)})
            raise
        request.put(next_key, {})
        try:
            self._send(request)
        except RuntimeError as e:
            # A worker that refuses leaves at once; its reason says more than a closed connection.
            self._await_workers(request, "verdict", only_present=True)
            raise WeightsError(f"the transfer broke off: {e}") from e
        self._await_workers(request, "verdict")

    def _await_workers(
        self, request: TransferRequest, kind: str, *, only_present: bool = False
    ) -> None:
        for worker in range(self._workers):
            key = f"{kind}/{request.number}/{worker}"
            if not only_present or request.store.check([f"{request.base}{key}"]):
                request.get(key, f"worker {worker}")


@dataclass(frozen=True, slots=True)
class ReceivingWorker:
    """One worker of one engine, as a receiver of versions."""

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
        """Rank in the group of a transfer, whose rank 0 is the sender."""
        return 1 + self.worker

    @property
    def ranks(self) -> int:
        """Size of that group."""
        return 1 + self.workers


class TransferClient:
    """A worker's side of its engine's requests to one sender.

    Args:
        worker: this worker.
        sender: trainer rank that sends.
    """

    def __init__(self, worker: ReceivingWorker, sender: int) -> None:
        self._worker = worker
        self._base, self._sender = f"{sender}/{worker.engine}/", f"trainer rank {sender}"
        self._store: Any = None
        self._number = 0

    def take(
        self,
        version: int,
        agree: Callable[[dict[str, Any]], None],
        receive: Callable[[TransferRequest], None],
    ) -> None:
        """Run one transfer; all of the engine's workers call this.

        Args:
            version: the version to receive.
            agree: checks the sender's answer; raises `WeightsError` to refuse it.
            receive: receives and checks the bytes.

        Raises:
            WeightsError: either side refused, or did not answer in time.
        """
        if self._store is None:
            # A busy host may take seconds to accept; the sender's time begins afterwards.
            self._store = self._worker.rendezvous.connect(max(self._worker.seconds, 20.0))
        deadline = time.monotonic() + self._worker.seconds
        request = TransferRequest(self._store, self._base, self._number, version, deadline)
        self._number += 1
        if self._worker.worker == 0:
            request.put(f"request/{request.number}", {"version": version})
        answer = request.get(f"answer/{request.number}", self._sender)
        with self._reporting(request, "ready"):
            agree(answer)
        request.get(f"go/{request.number}", self._sender)
        with self._reporting(request, "verdict"):
            receive(request)

    @contextmanager
    def _reporting(self, request: TransferRequest, kind: str) -> Iterator[None]:
        key = f"{kind}/{request.number}/{self._worker.worker}"
        try:
            yield
        except RuntimeError as e:
            request.put(key, {"error": str(e)})
            raise
        request.put(key, {})
