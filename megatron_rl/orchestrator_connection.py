"""A role's connection to the orchestrator: a DEALER socket in a thread of its own.

What was sent arrives once and in order, also if the connection is cut and made again (`delivery`).
The orchestrator may end the conversation, or be another process: then another one begins, with the
same class of message as the first one did. What is sent before that belongs to the earlier
conversation and is dropped. Another process has another address, too, which comes by a file.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from megatron_rl import messages as m
from megatron_rl.delivery import TICK_SECONDS, Frame, Link

_HEARTBEAT_MS = 5_000
_LINGER_MS = 1_000
_PAUSE_SECONDS = 5.0  # between two rounds of the thread: its process was stopped, or its machine
_LOOK_SECONDS = 1.0  # between two reads of the file with the endpoint, without a connection


class _File(msgspec.Struct):
    endpoint: str


class OrchestratorConnection:
    """Sends to the orchestrator and receives from it; every method may be called by any thread.

    Args:
        endpoint: ZeroMQ address of the orchestrator, or the file, `{"endpoint": "tcp://..."}`, that
            has it; it may be written later, and again for another orchestrator.
        name: the peer's name there; no two peers of a run have the same.
        deliver: called by the connection's thread with every message; None: they wait for `receive`
        on_new_conversation: called by it when another conversation begins, between the messages of
            the two; None: that ends the connection with an error.
    """

    def __init__(
        self,
        endpoint: str | Path,
        name: str,
        deliver: Callable[[bytes], None] | None = None,
        on_new_conversation: Callable[[], None] | None = None,
    ) -> None:
        # A SimpleQueue may wait for ever: Python 3.12 passes a negative time-out on.
        self._waiting: queue.Queue[bytes] = queue.Queue()
        self._deliver = deliver or self._waiting.put
        self._on_new_conversation = on_new_conversation
        self._link, self._outbox = Link(), deque[tuple[bool, bytes]]()
        self._opening: type[m.Message] | None = None
        self._is_open = True
        # `time.monotonic()` when the connection was lost, or of the start; None: connected.
        self.disconnected_since: float | None = time.monotonic()
        self.heard_at = time.monotonic()  # of the last frame, later if this process did not run
        self.error: Exception | None = None  # the error that ended the connection's thread
        self._closes_at: float | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.endpoint = str(endpoint)  # address of the orchestrator; the file, while it has none
        self._file = endpoint if isinstance(endpoint, Path) else None
        self._context, self._name = zmq.Context(), name
        self._open_socket("" if self._file else self.endpoint)
        self._thread = threading.Thread(target=self._run, name=f"{name} connection", daemon=True)
        self._thread.start()

    def send(self, message: m.Message) -> None:
        """Send a message; returns at once. In the handling of an error, see `send_failed`.

        Raises:
            ConnectionError: the connection's thread has ended.
        """
        self._raise_if_ended()
        self._opening = self._opening or type(message)
        self._outbox.append((type(message) is self._opening, m.encode(message)))
        os.eventfd_write(self._wake, 1)

    def send_failed(self, error: str) -> None:
        """Report the error that ends the role; without a connection it reaches its log alone."""
        with suppress(ConnectionError):
            self.send(m.Failed(error=error))

    def receive(self, seconds: float) -> m.AnyMessage | None:
        """Return the next message, None after so many seconds, or raise as `send`.

        Raises:
            ConnectionError: the connection's thread has ended.
        """
        try:
            data = self._waiting.get(timeout=seconds) if seconds > 0 else self._waiting.get_nowait()
        except queue.Empty:
            self._raise_if_ended()
            return None
        return m.decode(data)

    def close(self, seconds: float = 0.0) -> None:
        """Wait until all messages are acknowledged, for so long at most, and close the socket."""
        if self._closes_at is None:
            self._closes_at = time.monotonic() + seconds
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)

    def _raise_if_ended(self) -> None:
        if self.error is not None or self._closes_at is not None:
            why = self.error or "it was closed"
            raise ConnectionError(f"the connection to the orchestrator ended: {why}")

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as e:  # noqa: BLE001 - raised by the next `send` or `receive`
            self.error = e
        finally:
            self._close_socket(_LINGER_MS if self.disconnected_since is None else 0)
            self._context.term()

    def _open_socket(self, endpoint: str) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.identity = self._name.encode()
        self._socket.linger = 0
        self._socket.set_hwm(0)
        # A host that vanished closes no connection; heartbeats detect it.
        self._socket.heartbeat_ivl = _HEARTBEAT_MS
        self._socket.heartbeat_timeout = 6 * _HEARTBEAT_MS
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        address = f"inproc://{time.monotonic_ns()}"  # the default may be an earlier socket's
        self._monitor = self._socket.get_monitor_socket(events, address)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake):
            self._poller.register(source, zmq.POLLIN)
        if endpoint:
            self._socket.connect(endpoint)

    def _close_socket(self, linger: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=linger)

    def _serve(self) -> None:
        next_tick = next_look = 0.0
        looked_at = time.monotonic()
        while True:
            if (pause := time.monotonic() - looked_at) > _PAUSE_SECONDS:
                self.heard_at += pause
            looked_at = time.monotonic()
            if self.disconnected_since is not None and time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                self._look_for_another()
            ready = dict(self._poller.poll(int(1000 * TICK_SECONDS)))
            if self._monitor in ready:
                self._follow(parse_monitor_message(self._monitor.recv_multipart())["event"])
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while self._socket.poll(0):
                header, payload = self._socket.recv_multipart()
                self.heard_at = time.monotonic()
                is_message, back = self._link.receive(header, payload)
                if is_message:
                    self._deliver(payload)
                self._transmit(back)
                if self._link.is_ended:
                    self._begin_again()
            while self._outbox:
                opens, data = self._outbox.popleft()
                self._is_open |= opens
                if self._is_open:
                    self._transmit([self._link.send(data)])
            if (now := time.monotonic()) >= next_tick or self._closes_at is not None:
                next_tick = now + TICK_SECONDS
                self._transmit(self._link.tick())
            if self._closes_at is not None and (self._link.all_delivered or now >= self._closes_at):
                return

    def _look_for_another(self) -> None:
        if self._file is None:
            return
        try:
            address = endpoint = msgspec.json.decode(self._file.read_bytes(), type=_File).endpoint
        except OSError:
            return
        except msgspec.DecodeError:  # while it is written, or the wrong file
            address, endpoint = "", f"{self._file}, which has no endpoint"
        if endpoint != self.endpoint:
            self.endpoint = endpoint
            self._close_socket(0)
            self._open_socket(address)

    def _begin_again(self) -> None:
        if self._on_new_conversation is None:
            raise ConnectionError("the orchestrator is another process now")
        self._link, self._is_open = Link(), False
        self._outbox.clear()
        self._on_new_conversation()
        self._transmit(self._link.reconnected())

    def _follow(self, event: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self.disconnected_since = time.monotonic()
        else:
            self.disconnected_since = None
            self._transmit(self._link.reconnected())

    def _transmit(self, frames: list[Frame]) -> None:
        """Send frames; without a connection drop them, and the next one gets what is kept."""
        if self.disconnected_since is None:
            for frame in frames:
                self._socket.send_multipart(frame)
