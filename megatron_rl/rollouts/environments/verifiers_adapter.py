"""Environments of the package `verifiers` (0.4, with its tasksets, harnesses and rubrics).

The package drives an episode itself and asks an OpenAI endpoint for the policy's turns. Each worker
has such an endpoint, on the loopback: a request waits there for the next `step`, and is answered
with its message. So turns, tools and rewards are those of the package, whatever the environment.

    options: {agent: {max_turns: 4}, taskset: {...}}

are the package's configuration of an environment (`[env]`). Unlike there, an agent's program is by
default `chat_harness`, which runs in the worker, and its runtime is this machine.
"""

import asyncio
import importlib
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.dialects import ChatDialect

from megatron_rl.rollouts.environments import chat_harness
from megatron_rl.rollouts.environments.protocol import Opening, Step

HARNESS = "megatron_rl_chat"  # the name under which the package finds `chat_harness`
Request = tuple[dict[str, Any], "asyncio.Future[dict[str, Any]]"]
"""Body of a request for a completion, and the message that it waits for."""


def rows(name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tasks of `verifiers:name` as rows of a data set, for a file of JSON Lines.

    The verifier `exact` judges those rollouts only that reach a limit before their end.

    Raises:
        ValueError: it has tasks without end.
    """
    tasks = VerifiersEnvironments(name, options).taskset
    if not tasks.bounded:
        raise ValueError(f"verifiers:{name} has tasks without end: bound it in its configuration")
    return [
        {
            # An environment that speaks first has no prompt; the text names the task.
            "prompt": task.data.prompt_text or f"{name} {index}",
            "answer": str(getattr(task.data, "answer", "")).strip() or task.key,
            "kind": "exact",
            "meta": {"index": index, "key": task.key},
        }
        for index, task in enumerate(tasks)
    ]


class VerifiersEnvironments:
    """An environment of the package, with what the episodes of a worker share.

    `name` is that of an installed taskset (`gsm8k-v1`), or a module with one (`package.module`).
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        sys.modules[HARNESS] = chat_harness
        if "." in name:  # the package finds top-level modules only
            module, name = importlib.import_module(name), name.replace(".", "_").lower()
            sys.modules[name] = module
        self.name = name
        self.environment = vf.load_environment(_configuration(name, options))
        self.taskset = self.environment.taskset
        self.sessions: dict[str, VerifiersEpisode] = {}  # the episode of each trace
        self._tasks: list[Any] = []
        self._rest = iter(self.taskset)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve the model that the package asks (`context`) and the tools of the environment."""
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app)
        try:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            client = vf.EvalClientConfig(
                base_url=f"http://{host}:{port}/v1", api_key_var="MEGATRON_RL_POLICY_KEY"
            )
            self.context = vf.ModelContext(model="policy", client=client)
            async with self.environment.serving():
                yield
        finally:
            await runner.cleanup()

    def task(self, meta: dict[str, Any]) -> Any:
        """Return the task that a row names.

        Raises:
            ValueError: the row has no task of this environment.
        """
        remedy = f"write the rows of verifiers:{self.name} again (`verifiers_adapter.rows`)"
        index = meta.get("index")
        if not isinstance(index, int) or index < 0:
            raise ValueError(f"a row without `index` in its `meta`: {remedy}")
        missing = index + 1 - len(self._tasks)
        self._tasks += itertools.islice(self._rest, max(missing, 0))
        if index >= len(self._tasks) or meta.get("key", "") not in ("", self._tasks[index].key):
            raise ValueError(f"task {index} is not the one that the row was made from: {remedy}")
        return self._tasks[index]

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        session = request.headers.get(SESSION_ID_HEADER, "")
        episode = self.sessions.get(session)
        if episode is None:
            error = {"error": {"message": f"no episode has the session {session!r}"}}
            return web.json_response(error, status=404)
        message = await episode.ask(session, body)
        end = "tool_calls" if message.get("tool_calls") else "stop"
        completion = {
            "id": f"{session}-{time.monotonic_ns()}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body["model"],
            "choices": [
                {"index": 0, "message": {**message, "role": "assistant"}, "finish_reason": end}
            ],
        }
        if body.get("stream"):
            events = b"".join(ChatDialect().stream_events(completion))
            return web.Response(body=events, content_type="text/event-stream")
        return web.json_response(completion)


class VerifiersEpisode:
    """One episode of an environment of the package, as the protocol's `Environment`."""

    def __init__(self, environments: VerifiersEnvironments) -> None:
        self._environments = environments
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._asked: list[asyncio.Future[dict[str, Any]]] = []
        self._run: asyncio.Task[Any] | None = None
        self._traces: dict[str, Any] = {}
        self._policy = ""
        self._tools: list[dict[str, Any]] = []
        self._said: list[dict[str, Any]] = []

    async def reset(self, row: dict[str, Any]) -> Opening:
        """Run the environment to its first request."""
        task = await asyncio.to_thread(self._environments.task, row.get("meta") or {})
        shared = self._environments
        self._run = asyncio.create_task(
            shared.environment.run_episode(task, shared.context, on_trace=self._register)
        )
        body = await self._request()
        if body is None:
            self._end()
            raise RuntimeError("the episode ended without a turn of the policy")
        self._tools = body.get("tools") or []
        self._said = body["messages"]
        return Opening(messages=self._said, tools=self._tools)

    async def step(self, message: dict[str, Any]) -> Step:
        """Answer the request and run the environment to the next one, or to its end."""
        self._answer.set_result(message)
        body = await self._request()
        if body is None:
            return self._end()
        before = [*self._said, message]
        messages = body["messages"]
        if [_key(m) for m in messages[: len(before)]] != [_key(m) for m in before]:
            raise RuntimeError(
                "the agent's program changed the conversation (a summary, or several"
                " conversations), which is one sequence here: use a harness that does not"
            )
        if (body.get("tools") or []) != self._tools:
            raise RuntimeError("the agent's program changed its tools after the first turn")
        self._said = messages
        return Step(messages=messages[len(before) :])

    async def close(self) -> None:
        """End the environment, wherever it is."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait({self._run})
        for future in self._asked:
            future.cancel()
        for session in self._traces:
            del self._environments.sessions[session]

    async def ask(self, session: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the policy's message to a request."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._policy = self._policy or session
        if session != self._policy:
            name = self._environments.name
            error = RuntimeError(
                f"verifiers:{name} has several agents that ask for the policy; give all but one"
                " a `client` and a `model` of their own in the options"
            )
            future.set_exception(error)
        await self._requests.put((body, future))
        return await asyncio.shield(future)

    def _register(self, trace: Any) -> None:
        self._traces[trace.id] = trace
        self._environments.sessions[trace.id] = self

    async def _request(self) -> dict[str, Any] | None:
        """Return the next request; None if the episode has ended."""
        assert self._run is not None
        request = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait({request, self._run}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                return None
            body, self._answer = request.result()
            if self._answer.done():
                await self._answer  # which raises
            return body
        finally:
            request.cancel()

    def _end(self) -> Step:
        assert self._run is not None
        episode = self._run.result()
        errors = [*episode.errors, *(e for t in self._traces.values() for e in t.errors)]
        if not episode.ok:
            problems = "; ".join(f"{e.type}: {e.message}" for e in errors)
            raise RuntimeError(f"the environment failed: {problems}")
        if not self._policy:
            raise RuntimeError("the episode ended without a turn of the policy")
        trace = self._traces[self._policy]
        return Step(reward=trace.reward, done=True, reason=trace.stop_condition or "")


def _configuration(name: str, options: dict[str, Any]) -> Any:
    """Return the configuration, with our harness and this machine where the options say nothing."""
    raw = {**options, "taskset": {**options.get("taskset", {}), "id": name}}
    kind = vf.env_config_type(name, raw.get("id", ""))
    own_harness = vf.default_harness_id(name) == name
    for role, field in kind.model_fields.items():
        if not isinstance(default := field.default, vf.AgentConfig):
            continue
        agent = dict(raw.get(role) or {})
        if "runtime" not in agent and isinstance(default.runtime, vf.PrimeConfig):
            agent["runtime"] = {"type": "subprocess"}
        if "harness" not in agent and default.harness is None and not own_harness:
            agent["harness"] = {"id": HARNESS}
        raw[role] = agent
    return vf.resolve_env_config(raw)


def _key(message: dict[str, Any]) -> tuple[Any, ...]:
    """Return what of a message has to stay when the conversation goes on."""
    calls = [c["function"] for c in message.get("tool_calls") or []]
    return (
        message["role"],
        message.get("content") or "",
        *((c["name"], c["arguments"]) for c in calls),
    )


if __name__ == "__main__":
    environment, *configuration = sys.argv[1:]
    for row in rows(environment, json.loads(configuration[0]) if configuration else {}):
        print(json.dumps(row))
