"""The HTTP server of the endpoint: OpenAI chat completions, by vLLM's protocol classes.

vLLM's `OpenAIServingChat` renders each conversation again and submits it to the engine by itself:
past the exact ids of earlier turns, and past the hold of requests over a weight update. So its
classes of requests and answers are used, and sessions answer.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Coroutine, Iterator
from importlib import import_module
from typing import Any

from megatron_rl.config.rollout_settings import RolloutSettings
from megatron_rl.messages import TurnLimits
from megatron_rl.rollouts.endpoint.chat_requests import check, parsed
from megatron_rl.rollouts.endpoint.sessions import PolicyAnswer, Session
from megatron_rl.rollouts.rollout import RolloutPolicy

MODEL = "policy"
PROTOCOL = "vllm.entrypoints.openai.chat_completion.protocol"
START_SECONDS = STOP_SECONDS = 10.0
"""Longest time of the server's start and of its end."""
_POLL_SECONDS = 0.01


class Endpoint:
    """The server of one generator; start, use and stop it in one running event loop."""

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        temperature: float,
        think_start: str = "",
        port: int = 0,
    ) -> None:
        """Take the run's sampling temperature and its marker that opens thinking.

        Port 0: any free one.
        """
        self.settings, self.temperature = settings, temperature
        self._think_start, self._port = think_start, port
        self._sessions: dict[str, Session] = {}
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen at 127.0.0.1; `base_url` is valid from here.

        Raises:
            OSError: the port is in use.
            RuntimeError: the server did not start.
        """
        import uvicorn

        class Server(uvicorn.Server):
            """A server that leaves the process's signals to the generator."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        listener = socket.socket()
        try:
            listener.bind(("127.0.0.1", self._port))
        except OSError as e:
            listener.close()
            raise OSError(
                e.errno, f"the agents' endpoint cannot listen at 127.0.0.1:{self._port}: {e}"
            ) from e
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            _application(self),
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(STOP_SECONDS / 2),
        )
        self._server = Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        async with asyncio.timeout(START_SECONDS):
            while not self._server.started:
                if self._serving.done():
                    raise RuntimeError("the agents' endpoint did not start; the log has the cause")
                await asyncio.sleep(_POLL_SECONDS)

    async def stop(self) -> None:
        """End all sessions and the server."""
        for session in list(self._sessions.values()):
            self.close(session)
        if self._serving is not None:
            self._server.should_exit = True
            serving, self._serving = self._serving, None
            await asyncio.wait_for(serving, STOP_SECONDS)

    def open(self, policy: RolloutPolicy, limits: TurnLimits) -> Session:
        """Open a session; `close` it in any case."""
        session = Session(policy, limits, self.settings, self._think_start)
        self._sessions[session.id] = session
        return session

    def close(self, session: Session) -> None:
        """Remove a session; its requests in flight are cancelled."""
        self._sessions.pop(session.id, None)
        session.close()

    def session(self, session_id: str) -> Session | None:
        """Return an open session."""
        return self._sessions.get(session_id)

    def base_url(self, session: Session) -> str:
        """Return the `base_url` for an OpenAI client."""
        return f"http://127.0.0.1:{self._port}/sessions/{session.id}/v1"


def _application(endpoint: Endpoint) -> Any:
    """Return the ASGI application."""
    import_module(PROTOCOL)  # seconds, which the first request need not wait for
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList

    async def health(request: Request) -> Response:
        return Response()

    async def models(request: Request) -> Response:
        session = endpoint.session(request.path_params["id"])
        if session is None:
            return _error(404, _unknown(request))
        return JSONResponse(ModelList(data=[ModelCard(id=MODEL)]).model_dump())

    async def completions(request: Request) -> Response:
        session = endpoint.session(request.path_params["id"])
        if session is None:
            return _error(404, _unknown(request))
        try:
            body = parsed(await request.body())
            longest = check(body, endpoint.temperature)
            work = session.complete(body["messages"], body.get("tools"), longest)
            reply = await _while_connected(request, work)
        except ValueError as e:
            if session.failure is e:  # the engine's
                raise
            return _error(400, str(e))
        if reply is None:
            return _error(400, f"session {session.id} has ended")
        return _answer(reply, body)

    async def failed(request: Request, error: Exception) -> Response:
        return _error(500, f"{type(error).__name__}: {error}")

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/sessions/{id}/v1/models", models),
            Route("/sessions/{id}/v1/chat/completions", completions, methods=["POST"]),
        ],
        exception_handlers={Exception: failed},
    )


async def _while_connected(
    request: Any, work: Coroutine[Any, Any, PolicyAnswer]
) -> PolicyAnswer | None:
    """Return the reply; None if it was cancelled: the client is gone, or the session closed."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    return None if task.cancelled() else task.result()


def _answer(reply: PolicyAnswer, body: dict[str, Any]) -> Any:
    """Return the HTTP answer; one that is to be streamed comes as one chunk."""
    from starlette.responses import JSONResponse, Response
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionResponse,
        ChatCompletionStreamResponse,
    )

    model = body.get("model") or MODEL
    usage = {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    choice = {"index": 0, "finish_reason": reply.finish_reason}
    if not body.get("stream"):
        whole = ChatCompletionResponse.model_validate(
            {"model": model, "choices": [choice | {"message": reply.message}], "usage": usage}
        )
        return JSONResponse(whole.model_dump())
    calls = enumerate(reply.message.get("tool_calls", []))
    delta = reply.message | {"tool_calls": [{"index": i, **call} for i, call in calls]}
    parts: list[dict[str, Any]] = [{"model": model, "choices": [choice | {"delta": delta}]}]
    if (body.get("stream_options") or {}).get("include_usage"):
        parts.append({"model": model, "choices": [], "usage": usage})
    chunks = [ChatCompletionStreamResponse.model_validate(part) for part in parts]
    lines = [chunk.model_dump_json(exclude_unset=True) for chunk in chunks]
    whole_id, created, kind = chunks[0].id, chunks[0].created, chunks[0].object
    head = {"id": whole_id, "created": created, "object": kind}
    lines = [json.dumps(json.loads(line) | head) for line in lines]
    text = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
    return Response(text, media_type="text/event-stream")


def _error(status: int, message: str) -> Any:
    from starlette.responses import JSONResponse
    from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

    kinds = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
    error = ErrorResponse(error=ErrorInfo(message=message, type=kinds[status], code=status))
    return JSONResponse(error.model_dump(), status)


def _unknown(request: Any) -> str:
    return f"no session {request.path_params['id']!r}: it has ended, or never was"
