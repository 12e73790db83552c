"""A TCP proxy that aborts its connections, with what is under way in them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Self


class Proxy:
    """Forwards connections to `tcp://host:port`; `async with Proxy(target) as proxy`."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._running: set[asyncio.Task[None]] = set()
        self.connections = 0
        """Connections so far."""
        self.refuses = False
        """True: connections are closed at once."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        if self._running:
            await asyncio.wait(self._running, timeout=2)

    def cut(self) -> None:
        """Abort all connections."""
        reset = socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        for writer in list(self._writers):
            with contextlib.suppress(OSError):  # it is closed already
                writer.get_extra_info("socket").setsockopt(*reset)
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        to_reader, to_writer = await asyncio.open_connection(self._host, self._port)
        pair = {writer, to_writer}
        self._writers |= pair
        self.connections += 1
        try:
            await asyncio.gather(self._pump(reader, to_writer), self._pump(to_reader, writer))
        finally:
            for one in pair:
                one.close()
            self._writers -= pair

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()
