"""A request's rollouts: what fails through another's fault is made again where it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.generator.rollout_calls import INNOCENT_ATTEMPTS, RolloutCalls
from megatron_rl.rollouts.interruption import Completion
from megatron_rl.rollouts.rollout import Rollout, RolloutError, RolloutPolicy, RolloutPrompt

LIMITS = m.TurnLimits(1, 4)


@pytest.mark.parametrize(
    ("innocent", "failures", "made", "answer"),
    [
        (True, 2, 3, m.Sample),
        (False, 1, 1, m.RolloutFailed),
        (True, 99, INNOCENT_ATTEMPTS, m.RolloutFailed),
    ],
)
def test_a_rollout_whose_process_another_one_took_down_is_made_again_without_an_attempt(
    monkeypatch: pytest.MonkeyPatch, innocent: bool, failures: int, made: int, answer: type
) -> None:
    class Engine:
        routes = tokenizer = interruption = None
        max_tokens = 9

        async def complete(self, *arguments: Any) -> Completion:
            span = [m.VersionSpan(0, 0, 2)]
            return Completion(1, 4, None, [5, 6], [-1.0, -1.0], span, finish_reason="stop")

    sent: list[m.Message] = []
    calls = RolloutCalls(RunConfig(), Engine(), lambda change: None, sent.append)  # type: ignore[arg-type]
    times = 0

    async def function(prompt: RolloutPrompt, policy: RolloutPolicy) -> Rollout:
        nonlocal times
        times += 1
        rollout = Rollout()
        rollout.add(await policy.generate(prompt.token_ids, prompt.limits))
        if times <= failures:
            raise RolloutError("died", "its process died", innocent=innocent)
        return rollout

    async def function_of(task: str) -> Any:
        return function

    monkeypatch.setattr(calls, "_function", function_of)
    request = m.Generate(
        group=0, prompt_id=0, prompt=[1], limits=[LIMITS], indices=[0], temperature=1.0
    )
    assert asyncio.run(calls.answer(request, 0, LIMITS)) == 2 * made
    assert times == made
    assert [type(message) for message in sent] == [answer]
