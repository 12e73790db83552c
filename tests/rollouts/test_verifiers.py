"""Environments of the package `verifiers`: its turns, its tools, its rewards."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.data.tables import Source, read_questions
from megatron_rl.rollouts.environments.host import EnvironmentHost
from megatron_rl.rollouts.environments.verifiers_adapter import VerifiersEpisode, rows
from tests.rollouts.test_environments import children, fails, said, settings


def test_an_environment_of_verifiers_has_its_own_turns_tools_and_rewards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where the package keeps folders of its agents
    call = {"name": "adder_add", "arguments": '{"a": 2, "b": 2}'}
    wrong = {"name": "no", "arguments": "{}"}
    calls = [
        {"id": f"c{i}", "type": "function", "function": f} for i, f in enumerate([call, wrong])
    ]
    again = [{"role": "user", "content": "again"}]

    async def talk(host: EnvironmentHost) -> None:
        async with host.episode({"meta": {"index": 2}}) as episode:
            opening = await episode.reset()
            assert opening.messages == [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": "2+2"},
            ]
            assert [t["function"]["name"] for t in opening.tools] == ["adder_add"]
            step = await episode.step({"role": "assistant", "content": "", "tool_calls": calls})
            found = [(m["role"], m["tool_call_id"], m["content"]) for m in step.messages]
            assert found == [("tool", "c0", "4"), ("tool", "c1", "error: unknown tool 'no'")]
            assert (step.reward, step.done) == (None, False)
            for answer in ("5", ""):
                step = await episode.step(said(answer))
                assert (step.messages, step.reward, step.done) == (again, None, False)
            end = await episode.step(said("4"))
            assert (end.messages, end.reward, end.done) == ([], 1.0 + 0.25 / 4, True)

    async def stop(host: EnvironmentHost) -> None:
        async with host.episode({"meta": {"index": 1}}) as episode:
            await episode.reset()
            end = await episode.step(said("enough"))
            assert (end.reward, end.done, end.reason) == (0.25, True, "gave_up")

    async def fail(host: EnvironmentHost) -> None:
        async with host.episode({"meta": {"index": 0}}) as episode:
            await episode.reset()
            words = "ZeroDivisionError.*the rubric failed"
            await fails(episode.step(said("fault of the rubric")), "raised", words)
        async with host.episode({"meta": {"index": 3}}) as episode:
            await fails(episode.reset(), "raised", "task 3 is not the one")
        async with host.episode({"meta": {"index": 0}}) as episode:  # left in its midst
            await episode.reset()

    async def main() -> None:
        path, options = "verifiers:tests.rollouts.verifiers_cases", {"hints": 2}
        async with (
            asyncio.timeout(100),
            EnvironmentHost(path, options, settings(1, 60.0)) as host,
        ):
            await asyncio.gather(talk(host), stop(host), fail(host))

    asyncio.run(main())
    assert children(os.getpid()) == []


def test_tasks_of_verifiers_are_rows_of_a_data_set(tmp_path: Path) -> None:
    made = rows("tests.rollouts.verifiers_cases", {"taskset": {"length": 2}})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    first, second = read_questions(Source(file))
    assert (first.prompt, first.gold, first.meta["index"]) == ("0+0", "0", 0)
    assert (second.prompt, second.gold, second.meta["index"]) == ("1+1", "2", 1)


class Script:
    """What the episodes of a worker share, with an environment that only asks."""

    name, taskset = "script", None

    def __init__(self, *requests: tuple[str, list[str], list[str]]) -> None:
        self.environment, self.requests = self, requests
        self.sessions: dict[str, Any] = {}

    async def context(self) -> None:
        return None

    def task(self, meta: dict[str, Any]) -> None:
        return None

    async def run_episode(self, task: None, context: None, on_trace: Any) -> SimpleNamespace:
        for session, words, tools in self.requests:
            if session not in self.sessions:
                on_trace(SimpleNamespace(id=session, errors=[], reward=0.5, stop_condition=None))
            roles = itertools.cycle(["user", "assistant"])
            messages = [{"role": r, "content": w} for r, w in zip(roles, words, strict=False)]
            body = {"messages": messages, "tools": tools}
            await self.sessions[session].ask(session, body)
        return SimpleNamespace(ok=True, errors=[])


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (("a", ["ask", "said", "more"], []), ""),
        (("b", ["ask"], []), "several agents that ask"),
        (("a", ["a summary"], []), "changed the conversation"),
        (("a", ["ask", "edited", "more"], []), "changed the conversation"),
        (("a", ["ask", "said", "more"], ["new"]), "changed its tools"),
    ],
)
def test_a_conversation_of_verifiers_that_is_not_one_sequence_fails(
    second: tuple[str, list[str], list[str]], words: str
) -> None:
    async def main() -> None:
        script = Script(("a", ["ask"], []), second)
        episode = VerifiersEpisode(script)  # type: ignore[arg-type]
        await episode.reset({})
        if words:
            with pytest.raises(RuntimeError, match=words):
                await episode.step(said("said"))
        else:
            step = await episode.step(said("said"))
            assert [m["content"] for m in step.messages] == ["more"]
            assert (await episode.step(said("end"))).reward == 0.5
        await episode.close()
        assert script.sessions == {}

    asyncio.run(asyncio.wait_for(main(), 10))
