"""One place in the pool: a worker process, and a new one when it is lost."""

from __future__ import annotations

import asyncio
import contextlib

from megatron_rl.rewards.base import VerifierDown
from megatron_rl.rewards.process import WorkerProcess
from megatron_rl.rewards.protocol import (
    HEADER,
    Garbled,
    Request,
    Response,
    body_length,
    frame,
    read_response,
)
from megatron_rl.rewards.verifier_settings import VerifierSettings

GRACE_SECONDS = 5.0
"""A worker that did not kill itself so long after its limit is killed, and not believed."""


class Lost(RuntimeError):
    """The connection to a worker broke."""


class Slot:
    """One place for a worker process, which is started anew when it is lost."""

    def __init__(self, settings: VerifierSettings, kinds: tuple[str, ...]) -> None:
        self.settings, self.kinds = settings, kinds
        self.process = WorkerProcess(settings, kinds)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ready(self) -> None:
        """Wait until the worker can judge.

        Raises:
            VerifierDown: it cannot, and says why.
            Lost: something killed it meanwhile; another start may do.
        """
        try:
            async with asyncio.timeout(self.settings.start_seconds):
                self.process.socket.setblocking(False)
                self._streams = await asyncio.open_connection(sock=self.process.socket)
                response = await self._response()
        except TimeoutError:
            self._close()
            raise VerifierDown(
                f"a verifier worker did not start within {self.settings.start_seconds:g} s"
                f" (verifier.start_seconds)\n{self.process.kill()}"
            ) from None
        except Lost as e:
            self._close()
            if self.process.killed_by_signal():
                raise Lost("a worker was killed while it started") from None
            text = f"a verifier worker did not start: {e}\n{self.process.kill()}"
            raise VerifierDown(text) from None
        if response.status == "down":
            raise VerifierDown(response.reason)

    async def restart(self) -> None:
        """A new worker in place of the lost one.

        Raises:
            VerifierDown: see `ready`.
            Lost: see `ready`.
        """
        self.close()
        self.process = WorkerProcess(self.settings, self.kinds)
        await self.ready()

    def close(self) -> None:
        """Kill the worker and close the connection to it."""
        self._close()
        self.process.kill()

    async def ask(self, request: Request) -> Response:
        """The worker's response to a request.

        Raises:
            Lost: the worker is gone, or it did not answer within its own limits.
        """
        assert self._streams is not None, "the slot is not ready"
        _, writer = self._streams
        limit = self.settings.wall_seconds + GRACE_SECONDS
        if request.kind == "code":
            limit += self.settings.sandbox.total_seconds + 10.0
        try:
            async with asyncio.timeout(limit):
                writer.write(frame(request))
                await writer.drain()
                while True:
                    response = await self._response()
                    if response.id == request.id:
                        return response
        except TimeoutError:
            raise Lost(f"a worker did not answer within {limit:g} s") from None
        except (ConnectionError, OSError) as e:
            raise Lost(f"a worker is gone ({e})") from None

    async def _response(self) -> Response:
        assert self._streams is not None, "the slot is not connected"
        reader, _ = self._streams
        try:
            header = await reader.readexactly(HEADER.size)
            return read_response(await reader.readexactly(body_length(header)))
        except (asyncio.IncompleteReadError, ConnectionError, Garbled) as e:
            raise Lost(f"a worker is gone ({type(e).__name__})") from None

    def _close(self) -> None:
        if self._streams is not None:
            with contextlib.suppress(OSError):
                self._streams[1].close()
            self._streams = None
