"""From a request for completions to its answers, by the rollout functions of the tasks."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.rollouts.functions import rollout_function, single_turn
from megatron_rl.rollouts.rollout import (
    Rollout,
    RolloutError,
    RolloutFunction,
    RolloutPolicy,
    RolloutPrompt,
)

if TYPE_CHECKING:
    from megatron_rl.generator.engine import Engine

INNOCENT_ATTEMPTS = 10
"""Times that a rollout is made here while others take the process of its environment down."""


class RolloutCalls:
    """Calls the rollout function of each completion's task, and makes the answer of its result."""

    def __init__(
        self,
        config: RunConfig,
        engine: "Engine",
        count_running: Callable[[int], None],
        send: Callable[[m.Message], None],
    ) -> None:
        self.config, self._engine = config, engine
        self._count_running, self._send = count_running, send
        self._functions: dict[str, RolloutFunction] = {}
        self._starting, self._stack = asyncio.Lock(), AsyncExitStack()

    async def answer(self, request: m.Generate, index: int, limits: m.TurnLimits) -> int:
        """Make one completion and send it, or that it failed; return the tokens that it took.

        Raises:
            RolloutError: what the rollout function needs cannot be started.
            ValueError: the task has no such rollout function, or the engine takes no sequence of
                this length.
        """
        name, begun, grown = "", request.begun.get(index), None
        if self.config.schedule.mode == "synchronous":  # other modes can promise nothing
            name = f"{request.evaluation} {request.group} {index}"
        if request.evaluation < 0 and self._engine.routes is None:

            def grown(start: int, rest: m.Partial) -> None:
                self._send(m.Grown(group=request.group, index=index, start=start, rest=rest))

        prompt = RolloutPrompt(
            request.prompt, limits, request.task, request.row, request.evaluation >= 0, begun, grown
        )
        function = await self._function(request.task)
        seconds = None if function is single_turn else self.config.rollout.seconds
        tokens, failed = 0, None
        for _ in range(INNOCENT_ATTEMPTS):
            policy = RolloutPolicy(self._engine, request.temperature, name, self._count_running)
            try:
                async with asyncio.timeout(seconds) as limit:
                    self._send(self._sample(request, index, await function(prompt, policy)))
                    return tokens + policy.new_tokens
            except TimeoutError:
                if not limit.expired():
                    raise
                reason = f"it took longer than rollout.seconds = {seconds:g}"
                failed = RolloutError("timed out", reason)
            except RolloutError as e:
                failed = e
            tokens += policy.new_tokens
            if not failed.innocent:
                break
        assert failed is not None
        self._send(
            m.RolloutFailed(
                group=request.group, index=index, prompt_id=request.prompt_id,
                evaluation=request.evaluation, cause=failed.cause, reason=str(failed),
            )
        )  # fmt: skip
        return tokens

    async def close(self) -> None:
        """End what the rollout functions have started; the answers are cancelled before."""
        await self._stack.aclose()

    async def _function(self, task: str) -> RolloutFunction:
        async with self._starting:
            if task not in self._functions:
                self._functions[task] = await rollout_function(
                    self.config, task, self._engine.tokenizer, self._stack
                )
        return self._functions[task]

    def _sample(self, request: m.Generate, index: int, rollout: Rollout) -> m.Sample:
        routes, verdict = list[bytes](), rollout.verdict
        if self._engine.routes is not None and rollout.routes:
            lengths = [end - start for start, end in m.sequence_ranges(rollout.segments)]
            if rollout.segments[0].kind != "prompt":
                lengths[0] += len(request.prompt)
            known = zip(rollout.routes, lengths, strict=True)
            routes = [self._engine.routes.encoded(r, tokens) for r, tokens in known]
        return m.Sample(
            group=request.group,
            index=index,
            prompt_id=request.prompt_id,
            evaluation=request.evaluation,
            token_ids=m.int_bytes(rollout.token_ids),
            logprobs=m.float_bytes(rollout.logprobs),
            segments=rollout.segments,
            spans=rollout.spans,
            finish_reason=rollout.finish_reason,
            verdict=(verdict.outcome.value, verdict.reason, verdict.reward) if verdict else None,
            turn_rewards=rollout.turn_rewards,
            routes=routes,
        )
