"""The HTTP server of the endpoint: OpenAI chat completions.

vLLM's `OpenAIServingChat` renders each conversation again and submits it to the engine by itself:
past the exact ids of earlier turns, and past the hold of requests over a weight update. So only its
class of requests is used (`chat_requests.check`), and sessions answer.
"""

import asyncio
import json
import time
import uuid
from importlib import import_module
from typing import Any

from aiohttp import web

from megatron_rl.config.rollout_settings import RolloutSettings
from megatron_rl.messages import TurnLimits
from megatron_rl.rollouts.endpoint.chat_requests import PROTOCOL, check, parsed
from megatron_rl.rollouts.endpoint.sessions import PolicyAnswer, Session
from megatron_rl.rollouts.rollout import RolloutPolicy

MODEL = "policy"
STOP_SECONDS = 10.0  # longest time of the server's end; answers that are begun have half of it


class Endpoint:
    """The server of one generator; start, use and stop it in one running event loop.

    It has the run's sampling temperature and its marker that opens thinking.
    """

    def __init__(
        self, settings: RolloutSettings, *, temperature: float, think_start: str = ""
    ) -> None:
        self.settings = settings
        self._temperature, self._think_start = temperature, think_start
        self._sessions: dict[str, Session] = {}
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/sessions/{id}/v1/models", self._models)
        app.router.add_post("/sessions/{id}/v1/chat/completions", self._completions)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_SECONDS / 2
        )

    async def start(self) -> None:
        """Listen at a free port of 127.0.0.1; `base_url` is valid from here.

        Raises:
            OSError: it cannot listen there.
        """
        import_module(PROTOCOL)  # seconds, which the first request need not wait for
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()

    async def stop(self) -> None:
        """End all sessions and the server."""
        for session in list(self._sessions.values()):
            self.close(session)
        await asyncio.wait_for(self._runner.cleanup(), STOP_SECONDS)

    def open(self, policy: RolloutPolicy, limits: TurnLimits) -> Session:
        """Open a session; `close` it in any case."""
        session = Session(policy, limits, self.settings, self._think_start)
        self._sessions[session.id] = session
        return session

    def close(self, session: Session) -> None:
        """Remove a session; its requests in flight are cancelled."""
        self._sessions.pop(session.id, None)
        session.close()

    def base_url(self, session: Session) -> str:
        """Return the `base_url` for an OpenAI client."""
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/sessions/{session.id}/v1"

    async def _models(self, request: web.Request) -> web.Response:
        if request.match_info["id"] not in self._sessions:
            return _unknown(request)
        card = {"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "run"}
        return web.json_response({"object": "list", "data": [card]})

    async def _completions(self, request: web.Request) -> web.Response:
        if (session := self._sessions.get(request.match_info["id"])) is None:
            return _unknown(request)
        try:
            body = parsed(await request.read())
            longest = check(body, self._temperature)
            work = session.complete(body["messages"], body.get("tools"), longest)
            reply = await asyncio.create_task(work)
        except ValueError as e:
            if session.failure is e:  # the engine's
                raise
            return _error(400, "BadRequestError", str(e))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the client is gone
                raise
            return _error(400, "BadRequestError", f"session {session.id} has ended")
        return _answer(reply, body)


def _answer(reply: PolicyAnswer, body: dict[str, Any]) -> web.Response:
    """Return the HTTP answer; one that is to be streamed comes as one chunk."""
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or MODEL,
    }
    usage = {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    choice = {"index": 0, "finish_reason": reply.finish_reason, "logprobs": None}
    if not body.get("stream"):
        choices = [choice | {"message": reply.message}]
        return web.json_response(head | {"choices": choices, "usage": usage})
    calls = enumerate(reply.message.get("tool_calls", []))
    delta = reply.message | {"tool_calls": [{"index": i, **call} for i, call in calls]}
    parts: list[dict[str, Any]] = [{"choices": [choice | {"delta": delta}]}]
    if (body.get("stream_options") or {}).get("include_usage"):
        parts.append({"choices": [], "usage": usage})
    head["object"] = "chat.completion.chunk"
    lines = [*(json.dumps(head | part) for part in parts), "[DONE]"]
    text = "".join(f"data: {line}\n\n" for line in lines)
    return web.Response(text=text, content_type="text/event-stream")


def _error(status: int, kind: str, message: str) -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def _unknown(request: web.Request) -> web.Response:
    message = f"no session {request.match_info['id']!r}: it has ended, or never was"
    return _error(404, "NotFoundError", message)
