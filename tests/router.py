"""The orchestrator's side of the roles' connections, without an orchestrator."""

from __future__ import annotations

import zmq

from megatron_rl import messages as m
from megatron_rl.delivery import Links


class Router:
    """A bound socket whose peers are `OrchestratorConnection`s of other processes or threads."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.router_handover = 1
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._links = Links()

    def send(self, to: str, message: m.Message) -> None:
        """Send a message to the peer of this name."""
        for frame in self._links.send(to, m.encode(message)):
            self._socket.send_multipart([to.encode(), *frame])

    def end(self, name: str) -> None:
        """End the conversation with a peer."""
        for frame in self._links.end(name):
            self._socket.send_multipart([name.encode(), *frame])

    def receive(self, seconds: float) -> tuple[str, m.AnyMessage] | None:
        """Return (sender, message), or None if none comes within so many seconds."""
        while self._socket.poll(int(1000 * seconds)):
            identity, header, payload = self._socket.recv_multipart()
            is_message, back = self._links.receive(identity, header, payload)
            for frame in back:
                self._socket.send_multipart([identity, *frame])
            for to, frame in self._links.tick():
                self._socket.send_multipart([to.encode(), *frame])
            if is_message:
                return identity.decode(), m.decode(payload)
        return None

    def close(self) -> None:
        """Close the socket at once."""
        self._socket.close(linger=0)
        self._context.term()
