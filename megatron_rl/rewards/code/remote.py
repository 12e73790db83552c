"""The sandbox as a service: the same results over HTTP, one JSON line per test.

`POST /run` takes `{"source", "tests"}`; limits are the server's. A busy server answers 503. The
client takes up again after the last result that it has, and gives up with `VerifierDown`.
"""

from __future__ import annotations

import dataclasses
import http.client
import http.server
import json
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

from megatron_rl.rewards.base import SandboxUnavailable, VerifierDown
from megatron_rl.rewards.code import isolation
from megatron_rl.rewards.code.sandbox import ProgramResult, run_tests
from megatron_rl.rewards.verifier_settings import SandboxSettings

FIRST_PAUSE_SECONDS = 0.2
MAX_REQUEST = 256 * 2**20


class _Broken(ConnectionError):
    """A try failed; the message says how."""


def run_remotely(
    source: str, tests: list[dict[str, Any]], settings: SandboxSettings
) -> Iterator[ProgramResult]:
    """Results of the tests from the service at `remote_url`.

    Raises:
        VerifierDown: no result within the tries.
    """
    done, failures, pause = 0, 0, FIRST_PAUSE_SECONDS
    while done < len(tests):
        try:
            for result in _ask(source, tests[done:], settings):
                yield result
                done, failures, pause = done + 1, 0, FIRST_PAUSE_SECONDS
                if result.status in ("total", "killed"):
                    return
            if done < len(tests):
                raise _Broken("the answer ended too early")
        except (OSError, http.client.HTTPException, ValueError) as e:
            failures += 1
            if failures > settings.remote_retries:
                raise VerifierDown(
                    f"the sandbox service at {settings.remote_url} failed {failures} times:"
                    f" {type(e).__name__}: {e}; start it with `megatron-rl rewards serve`"
                ) from None
            time.sleep(pause)
            pause = min(2 * pause, 10.0)


def _ask(
    source: str, tests: list[dict[str, Any]], settings: SandboxSettings
) -> Iterator[ProgramResult]:
    url = urllib.parse.urlsplit(settings.remote_url or "")
    factory = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = factory(url.hostname or "", url.port, timeout=settings.total_seconds + 10)
    try:
        body = json.dumps({"source": source, "tests": tests})
        connection.request("POST", f"{url.path.rstrip('/')}/run", body)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            text = response.read(500).decode(errors="replace")
            raise _Broken(f"status {response.status}: {text}")
        for line in response:
            yield ProgramResult(**json.loads(line))
    finally:
        connection.close()


class SandboxServer:
    """Serves programs in this host's sandbox until it is closed.

    Args:
        settings: isolation and limits of every program.
        host: address to listen on.
        port: 0 takes a free one.
        programs: programs at once; more are answered 503.

    Raises:
        SandboxUnavailable: the host has not the isolation that is asked for.
    """

    def __init__(self, settings: SandboxSettings, host: str, port: int, programs: int) -> None:
        if settings.isolation == "remote":
            raise SandboxUnavailable("a sandbox service cannot itself be remote: use strong")
        isolation.require(settings)
        places = threading.BoundedSemaphore(programs)

        class Handler(_Handler):
            limits, free = settings, places

        self._server = http.server.ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.address = f"http://{host}:{self._server.server_address[1]}"

    def run(self) -> None:
        """Serve in this thread."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    limits: SandboxSettings
    free: threading.BoundedSemaphore
    timeout = 60

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if self.path != "/run" or not 0 < length <= MAX_REQUEST:
            self.send_error(404 if self.path != "/run" else 413)
            return
        body = self.rfile.read(length)
        try:
            job = json.loads(body)
            source, tests = str(job["source"]), list(job["tests"])
        except (ValueError, KeyError, TypeError):
            self.send_error(400)
            return
        if not self.free.acquire(blocking=False):
            self.send_error(503)
            return
        try:
            self._answer(source, tests)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client had enough: the first failed test decides
        finally:
            self.free.release()

    def _answer(self, source: str, tests: list[dict[str, Any]]) -> None:
        self.send_response(200)
        self.end_headers()
        results = run_tests(source, tests, self.limits)
        try:
            for result in results:
                self.wfile.write(json.dumps(dataclasses.asdict(result)).encode() + b"\n")
        finally:
            results.close()  # type: ignore[attr-defined]

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
