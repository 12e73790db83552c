"""The endpoint by the OpenAI client library: what agents see, and what is kept for training."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from megatron_rl.config.rollout_settings import RolloutSettings
from megatron_rl.messages import TurnLimits, VersionSpan
from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.rollouts.endpoint import sessions
from megatron_rl.rollouts.endpoint.agent import AgentRollout
from megatron_rl.rollouts.endpoint.server import Endpoint
from megatron_rl.rollouts.endpoint.sessions import Session
from megatron_rl.rollouts.interruption import Completion
from megatron_rl.rollouts.rollout import Rollout, RolloutError, RolloutPrompt
from tests.rollouts import templates

LIMITS = TurnLimits(0, 200)
HUNG = 40
"""Agents at once: more than asyncio's pool has threads, at most 32."""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
QUESTION: Any = {"role": "user", "content": "1 + 2?"}
WORDS = templates.tokenizer("qwen3")


class FakePolicy:
    """Says these texts, one after the other; turn n is of version n, and log-probs count down."""

    tokenizer, max_tokens, forced_tokens = WORDS, 2000, 0

    def __init__(self, *texts: str, seconds: float = 0.0) -> None:
        self.texts, self.seconds = texts, seconds
        self.prompts: list[list[int]] = []
        self.limits: list[TurnLimits] = []
        self.turns: list[list[int]] = []
        self.cancelled = 0

    async def generate(self, token_ids: list[int], limits: TurnLimits, **_: Any) -> Completion:
        self.prompts.append(list(token_ids))
        self.limits.append(limits)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        number = len(self.turns)
        ids = WORDS.encode(self.texts[number] + "<|im_end|>", add_special_tokens=False)
        ids, reason = ids[: limits.answer], "stop" if len(ids) <= limits.answer else "length"
        self.turns.append(ids)
        logprobs = [-float(i + 1) for i in range(len(ids))]
        spans = [VersionSpan(number, 0, len(ids))]
        return Completion(0, limits.answer, None, ids, logprobs, spans, finish_reason=reason)


CLIENTS: list[AsyncOpenAI] = []
Work = Callable[[Endpoint], Awaitable[None]]


def serve(work: Work, **settings: Any) -> None:
    """Run a test's coroutine with a server, which must leave no task."""

    async def main() -> None:
        endpoint = Endpoint(RolloutSettings(**settings), temperature=1.0)
        await endpoint.start()
        try:
            await work(endpoint)
        finally:
            while CLIENTS:
                await CLIENTS.pop().close()
            await endpoint.stop()
        await asyncio.get_running_loop().shutdown_asyncgens()  # of clients' streams
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def bounded() -> None:
        await asyncio.wait_for(main(), 20)

    asyncio.run(bounded())


def client(endpoint: Endpoint, session: Session, **options: Any) -> Any:
    options = {"timeout": 10.0, "max_retries": 0} | options
    url = endpoint.base_url(session)
    CLIENTS.append(AsyncOpenAI(base_url=url, api_key=session.id, **options))
    return CLIENTS[-1].chat.completions.create


async def run_one(agent: Any, endpoint: Endpoint, policy: FakePolicy) -> Rollout:
    return await AgentRollout(agent, endpoint)(RolloutPrompt([], LIMITS), policy)


async def run(
    agent: Any, endpoint: Endpoint, policy: FakePolicy, row: dict[str, Any] | None = None
) -> Rollout:
    try:
        return await AgentRollout(agent, endpoint)(RolloutPrompt([], LIMITS, row=row or {}), policy)
    finally:
        assert not endpoint._sessions


def asking(**options: Any) -> Any:
    """Return an agent that makes one request after the other, each with all turns before."""
    questions = options.pop("questions", ["1 + 2?"])

    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        messages: list[Any] = []
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as own:
            for question in questions:
                messages.append({"role": "user", "content": question})
                answer = await own.chat.completions.create(
                    model="any", messages=messages, **options
                )
                messages.append(answer.choices[0].message)

    return agent


def test_two_turns_with_a_tool_keep_exact_ids_logprobs_and_versions() -> None:
    policy = FakePolicy(f"I add.{CALL}", "It is 3.")
    seen: list[Any] = []

    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=10) as own:
            messages: list[Any] = [
                {"role": "user", "content": [{"type": "text", "text": row["q"]}]}
            ]
            for _ in range(2):
                answer = await own.chat.completions.create(
                    model="any", messages=messages, tools=TOOLS, temperature=1.0
                )
                seen.append(answer)
                messages.append(answer.choices[0].message)
                for call in answer.choices[0].message.tool_calls or []:
                    value = sum(json.loads(call.function.arguments).values())
                    messages.append(
                        {"role": "tool", "tool_call_id": call.id, "content": str(value)}
                    )
        return 0.5

    async def work(endpoint: Endpoint) -> None:
        rollout = await run(agent, endpoint, policy, {"q": "1 + 2?"})
        first, second = policy.turns
        assert policy.prompts[1][: len(policy.prompts[0]) + len(first)] == policy.prompts[0] + first
        assert rollout.token_ids == policy.prompts[1] + second
        kinds = [s.kind for s in rollout.segments]
        assert kinds == ["prompt", "sampled", "given", "sampled"]
        for segment, turn in zip(rollout.segments[1::2], policy.turns, strict=True):
            assert rollout.token_ids[segment.start : segment.end] == turn
            kept = rollout.logprobs[segment.start : segment.end]
            assert kept == [-float(i + 1) for i in range(len(turn))]
        assert [s.version for s in rollout.spans] == [0, 1]
        assert rollout.spans[1].start == rollout.segments[3].start
        assert rollout.spans[-1].end == len(rollout.token_ids)
        assert (rollout.turns, rollout.tool_calls, rollout.finish_reason) == (2, 1, "stop")
        assert rollout.verdict == Verdict(Outcome.CORRECT, "agent: 0.5", 0.5)

    serve(work)
    assert [a.choices[0].finish_reason for a in seen] == ["tool_calls", "stop"]
    assert [a.choices[0].message.content for a in seen] == ["I add.", "It is 3."]
    assert seen[1].usage.prompt_tokens == len(policy.prompts[1])
    assert '{"a": 1' not in WORDS.decode(policy.prompts[1])  # not written anew


CONTRADICTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"n": 2},
    {"stop": ["x"]},
    {"logit_bias": {"3": 1}},
    {"presence_penalty": 0.5},
    {"logprobs": True},
    {"extra_body": {"top_k": 5}},
    {"response_format": {"type": "json_object"}},
    {"max_tokens": 0},
    {"messages": []},
]


def test_requests_that_contradict_the_run_are_refused() -> None:
    async def work(endpoint: Endpoint) -> None:
        session = endpoint.open(FakePolicy("3"), LIMITS)
        create = client(endpoint, session)
        for parameters in CONTRADICTIONS:
            with pytest.raises(openai.BadRequestError):
                await create(**{"model": "any", "messages": [QUESTION]} | parameters)
        assert (session.rollout.turns, session.failure) == (0, None)
        answer = await create(
            model="any", messages=[QUESTION], top_p=1, n=1, stop=[], seed=1, user="me"
        )
        assert answer.choices[0].message.content == "3"
        with pytest.raises(openai.BadRequestError, match="`top_p` is 0.9"):
            await create(model="any", messages=[QUESTION], top_p=0.9)

    serve(work)


def said(role: str, content: Any = "3", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def called(**fields: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}} | fields
    return said("assistant", None, tool_calls=[call])


def text_parts(*parts: Any) -> dict[str, Any]:
    return {"messages": [said("user", list(parts))]}


ANSWER = said("tool", tool_call_id="a")
MALFORMED: list[tuple[Any, str]] = [
    (b"{", "no JSON"),
    (b"\xff", "no JSON"),
    ([], "no JSON object"),
    ({}, "`messages` is"),
    ({"messages": "1 + 2?"}, "`messages` is"),
    ({"messages": ["1 + 2?"]}, "`messages[0]` is"),
    ({"messages": [{"content": "3"}]}, "`messages[0].role` is None"),
    ({"messages": [QUESTION, said("critic")]}, "`messages[1].role` is 'critic'"),
    ({"messages": [said(["user"])]}, "`messages[0].role`"),  # type: ignore[arg-type]
    ({"messages": [said("user", None)]}, "`messages[0].content`"),
    ({"messages": [said("user", 3)]}, "`messages[0].content`"),
    (text_parts("3"), "`messages[0].content[0].type` is None"),
    (text_parts({"type": "image_url", "image_url": {"url": "x"}}), "`messages[0].content[0].type`"),
    (text_parts({"type": "text"}), "`messages[0].content[0].text`"),
    ({"messages": [said("user", "\ud800")]}, "`messages` has"),
    ({"messages": [said("user", name=3)]}, "`messages[0].name`"),
    ({"messages": [called(), said("tool")]}, "`messages[1].tool_call_id` is None"),
    ({"messages": [QUESTION, ANSWER]}, "`messages[1].tool_call_id` is 'a'"),
    ({"messages": [called(), said("tool", tool_call_id=["a"])]}, "`messages[1].tool_call_id`"),
    ({"messages": [said("assistant", tool_calls=3)]}, "`messages[0].tool_calls`"),
    ({"messages": [called(id=None)]}, "`messages[0].tool_calls[0].id`"),
    ({"messages": [called(function="add")]}, "`messages[0].tool_calls[0].function.name`"),
    ({"tools": "add"}, "`tools`"),
    ({"tools": [{"type": "function"}]}, "`tools[0].function.name`"),
    ({"tools": [{"type": "x", "function": {"name": "add"}}]}, "`tools.0.type`"),
    ({"max_tokens": "many"}, "`max_tokens`"),
    ({"temperature": []}, "`temperature`"),
    ({"stream_options": {"include_usage": True}}, "`stream=True`"),
    ({"stream": True, "stream_options": 3}, "`stream_options`"),
    ({"top_logprobs": "1"}, "`top_logprobs`"),
    ({"tools": []}, "`tools`"),
]


def test_malformed_requests_are_refused_by_the_name_of_the_field() -> None:
    async def work(endpoint: Endpoint) -> None:
        session = endpoint.open(FakePolicy("3"), LIMITS)
        url = f"{endpoint.base_url(session)}/chat/completions"
        async with httpx.AsyncClient() as plain:
            for body, named in MALFORMED:
                if isinstance(body, dict) and body and "messages" not in body:
                    body = body | {"messages": [QUESTION]}
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                answer = await plain.post(url, content=content)
                assert answer.status_code == 400, (body, answer.text)
                assert named in answer.json()["error"]["message"], (body, answer.text)
            assert (session.rollout.turns, session.failure) == (0, None)
            messages = [said("user", [{"type": "text", "text": "1 +"}]), called(), ANSWER]
            answer = await plain.post(url, json={"messages": messages, "max_tokens": "50"})
            assert answer.json()["choices"][0]["message"]["content"] == "3"

    serve(work)


def test_a_call_whose_arguments_are_no_json_is_the_policys_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{1"}}
    made: list[str] = []

    class Parser:
        def __init__(self, *_: Any) -> None:
            made.append("once")

        def __call__(self, token_ids: list[int], tools: Any) -> dict[str, Any]:
            return said("assistant", "", tool_calls=[broken])

    monkeypatch.setattr(sessions, "CallParser", Parser)

    async def work(endpoint: Endpoint) -> None:
        session = endpoint.open(FakePolicy("one", "two"), LIMITS)
        create = client(endpoint, session)
        first = await create(model="any", messages=[QUESTION], tools=TOOLS)
        messages = [QUESTION, first.choices[0].message, ANSWER]
        await create(model="any", messages=messages, tools=TOOLS)
        assert session.rollout.turns == 2 and made == ["once"]

    serve(work)


def test_a_repeated_request_has_the_same_answer_and_no_second_turn() -> None:
    async def work(endpoint: Endpoint) -> None:
        policy = FakePolicy("one", "two", seconds=0.05)
        session = endpoint.open(policy, LIMITS)
        create = client(endpoint, session)
        requests = [create(model="any", messages=[QUESTION]) for _ in range(2)]
        answers = await asyncio.gather(*requests)
        assert [a.choices[0].message.content for a in answers] == ["one", "one"]
        assert session.rollout.turns == 1

    serve(work)


def test_a_request_that_its_client_gave_up_is_cancelled_and_can_be_made_again() -> None:
    async def work(endpoint: Endpoint) -> None:
        policy = FakePolicy("one", "two")
        session = endpoint.open(policy, LIMITS)
        create = client(endpoint, session)
        first = (await create(model="any", messages=[QUESTION])).choices[0].message
        messages = [QUESTION, first, QUESTION]
        policy.seconds = 5.0
        with pytest.raises(openai.APITimeoutError):
            await client(endpoint, session, timeout=0.3)(model="any", messages=messages)
        for _ in range(100):
            await asyncio.sleep(0.01)
            if policy.cancelled:
                break
        policy.seconds = 0.0
        answer = await create(model="any", messages=messages)
        assert answer.choices[0].message.content == "two"
        assert (policy.cancelled, session.rollout.turns) == (1, 2)
        assert [s.kind for s in session.rollout.segments] == [
            "prompt",
            "sampled",
            "given",
            "sampled",
        ]
        assert policy.prompts[1] == policy.prompts[2]

    serve(work)


@pytest.mark.parametrize("history", ["refuse", "split"])
def test_a_rewritten_history_is_refused_or_a_sequence_of_its_own(history: str) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> bool:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=10) as own:
            for content in ("1 + 2?", "Another."):
                await own.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": content}]
                )
        return True

    async def work(endpoint: Endpoint) -> None:
        policy = FakePolicy("one", "two")
        if history == "refuse":
            with pytest.raises(RolloutError, match="do not continue") as caught:
                await run(agent, endpoint, policy)
            assert caught.value.cause == "history"
            return
        rollout = await run(agent, endpoint, policy)
        assert [s.kind for s in rollout.segments] == ["prompt", "sampled"] * 2
        third = rollout.segments[2]
        assert rollout.token_ids[third.start : third.end] == policy.prompts[1]
        assert rollout.verdict == Verdict(Outcome.CORRECT, "agent: True")

    serve(work, history=history)


def test_turns_are_bounded_and_a_rollout_that_needs_more_is_truncated() -> None:
    async def work(endpoint: Endpoint) -> None:
        rollout = await run(asking(questions="abc"), endpoint, FakePolicy(*"xyz"))
        assert (rollout.turns, rollout.finish_reason, rollout.verdict) == (2, "length", None)
        rollout = await run(asking(questions="ab"), endpoint, FakePolicy(*"xyz"))
        assert (rollout.turns, rollout.finish_reason) == (2, "stop")

    serve(work, max_turns=2)


def test_tokens_are_bounded() -> None:
    async def work(endpoint: Endpoint) -> None:
        policy = FakePolicy("word " * 30, "word " * 30)
        policy.max_tokens = 60
        rollout = await run(asking(questions="ab"), endpoint, policy)
        assert len(rollout.token_ids) == 59 == rollout.segments[0].end + policy.limits[0].answer
        assert (rollout.turns, rollout.finish_reason) == (1, "length")
        await run(asking(max_tokens=5), endpoint, policy := FakePolicy("word " * 30))
        assert policy.limits == [TurnLimits(0, 5)]

    serve(work)


def test_a_stream_is_one_chunk() -> None:
    async def work(endpoint: Endpoint) -> None:
        create = client(endpoint, endpoint.open(FakePolicy(f"So.{CALL}"), LIMITS))
        stream = await create(
            model="any",
            messages=[QUESTION],
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunk, last = [c async for c in stream]
        assert chunk.choices[0].delta.content == "So."
        assert chunk.choices[0].delta.tool_calls[0].function.name == "add"
        assert chunk.choices[0].finish_reason == "tool_calls"
        assert last.usage.completion_tokens > 0 and chunk.id == last.id

    serve(work)


async def raises(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    raise KeyError("gold")


async def idles(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    return 1.0


async def exits(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    raise SystemExit(3)


def exits_in_a_thread(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    raise SystemExit(3)


async def is_cancelled_by_itself(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    raise asyncio.CancelledError


async def hangs(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    await asyncio.sleep(60)


async def returns_text(base_url: str, api_key: str, row: dict[str, Any]) -> Any:
    await asking()(base_url, api_key, row)
    return "good"


@pytest.mark.parametrize(
    ("agent", "cause"),
    [
        (raises, "raised"),
        (exits, "raised"),
        (exits_in_a_thread, "raised"),
        (is_cancelled_by_itself, "raised"),
        (idles, "no request"),
        (hangs, "timed out"),
        (returns_text, "raised"),
    ],
)
def test_a_failed_agent_has_no_reward(agent: Any, cause: str) -> None:
    async def work(endpoint: Endpoint) -> None:
        with pytest.raises(RolloutError) as caught:
            await run(agent, endpoint, FakePolicy("3"))
        assert caught.value.cause == cause

    serve(work, seconds=0.5)


def test_a_request_in_flight_ends_with_the_time_of_a_plain_function() -> None:
    ended: list[str] = []

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        with OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=10) as own:
            for _ in range(2):
                try:
                    own.chat.completions.create(model="any", messages=[QUESTION])
                except openai.APIStatusError as e:
                    ended.append(str(e.status_code))

    async def work(endpoint: Endpoint) -> None:
        policy = FakePolicy("3", seconds=30)
        with pytest.raises(RolloutError, match="ran longer than"):
            await run(agent, endpoint, policy)
        end = time.monotonic() + 5
        while len(ended) < 2 and time.monotonic() < end:
            await asyncio.sleep(0.01)
        assert (policy.cancelled, ended) == (1, ["400", "404"])

    serve(work, seconds=0.5)


def test_plain_functions_that_never_return_hold_up_neither_others_nor_the_end() -> None:
    released = threading.Event()

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        if not row:
            released.wait(60)
        OpenAI(base_url=base_url, api_key=api_key, timeout=10).chat.completions.create(
            model="any", messages=[QUESTION]
        )
        return 1.0

    async def work(endpoint: Endpoint) -> None:
        hung = (run_one(agent, endpoint, FakePolicy("3")) for _ in range(HUNG))
        causes = [e.cause for e in await asyncio.gather(*hung, return_exceptions=True)]
        assert causes == ["timed out"] * HUNG
        assert await asyncio.to_thread(lambda: "served") == "served"
        rollout = await run(agent, endpoint, FakePolicy("3"), {"q": "1 + 2?"})
        assert rollout.verdict == Verdict(Outcome.CORRECT, "agent: 1", 1.0)

    try:
        begun = time.monotonic()
        serve(work, seconds=1.0)
        assert time.monotonic() - begun < 15
    finally:
        released.set()


def test_the_servers_end_ends_a_request_in_flight_and_fails_its_rollout() -> None:
    async def work(endpoint: Endpoint) -> None:
        policy = FakePolicy("3", seconds=60)
        rollout = asyncio.create_task(run(asking(), endpoint, policy))
        while not policy.prompts:
            await asyncio.sleep(0.01)
        await endpoint.stop()
        with pytest.raises(RolloutError, match="has ended") as caught:
            await asyncio.wait_for(rollout, 5)
        assert (caught.value.cause, policy.cancelled) == ("raised", 1)

    serve(work)


def test_an_error_of_the_engine_is_no_error_of_the_agent() -> None:
    async def work(endpoint: Endpoint) -> None:
        with pytest.raises(IndexError):  # the policy has nothing to say
            await run(asking(), endpoint, FakePolicy())

    serve(work)


def test_other_routes() -> None:
    async def work(endpoint: Endpoint) -> None:
        session = endpoint.open(FakePolicy("3"), LIMITS)
        own = AsyncOpenAI(base_url=endpoint.base_url(session), api_key="any", timeout=10)
        CLIENTS.append(own)
        assert [m.id async for m in await own.models.list()] == ["policy"]
        endpoint.close(session)
        with pytest.raises(openai.NotFoundError, match="no session"):
            await own.chat.completions.create(model="any", messages=[QUESTION])

    serve(work)
