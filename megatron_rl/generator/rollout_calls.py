"""From a request for completions to its answers, by the rollout functions of the tasks."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.rollouts.functions import rollout_function
from megatron_rl.rollouts.interruption import Completion
from megatron_rl.rollouts.rollout import Rollout, RolloutError, RolloutFunction, RolloutPrompt
from megatron_rl.rollouts.single_turn import single_turn

if TYPE_CHECKING:
    from megatron_rl.generator.engine import Engine

INNOCENT_ATTEMPTS = 10
"""Times that a rollout is made here while others take the process of its environment down."""
CountRunning = Callable[[int], None]
"""Is told +1 when a turn begins to be decoded, -1 at its end."""


class EnginePolicy:
    """The policy of one rollout, by the engine of this process (`rollouts.rollout.RolloutPolicy`).

    `name` is that of the rollout in the run, from which the noise of its turns follows; empty: any
    noise.
    """

    def __init__(
        self, engine: "Engine", temperature: float, name: str, count_running: CountRunning
    ) -> None:
        self._engine, self._temperature, self._name = engine, temperature, name
        self._count_running, self._turns = count_running, 0
        self.new_tokens = 0
        """Tokens of its turns that this engine made."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the engine takes."""
        return self._engine.max_tokens

    @property
    def forced_tokens(self) -> int:
        """Tokens of the interruption's phrase."""
        interruption = self._engine.interruption
        return 0 if interruption is None else len(interruption.phrase)

    async def generate(
        self,
        token_ids: list[int],
        limits: m.TurnLimits,
        *,
        begun: m.Partial | None = None,
        grown: Callable[[int, m.Partial], None] | None = None,
    ) -> Completion:
        """Sample one turn (`rollouts.rollout.RolloutPolicy.generate`)."""
        name = self._name + (f" turn {self._turns}" if self._name and self._turns else "")
        self._turns += 1
        self._count_running(+1)
        try:
            turn = await self._engine.complete(
                token_ids,
                limits.thinking,
                limits.answer,
                self._temperature,
                begun,
                grown,
                name,
            )
        finally:
            self._count_running(-1)
        self.new_tokens += len(turn.token_ids) - (begun.num_tokens if begun else 0)
        return turn


class RolloutCalls:
    """Calls the rollout function of each completion's task, and makes the answer of its result."""

    def __init__(
        self,
        config: RunConfig,
        engine: "Engine",
        count_running: CountRunning,
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
            grown = partial(self._grown, request.group, index)
        prompt = RolloutPrompt(
            request.prompt, limits, request.task, request.row, request.evaluation >= 0, begun, grown
        )
        function = await self._function(request.task)
        seconds = None if function is single_turn else self.config.rollout.seconds
        tokens, failed = 0, None
        for _ in range(INNOCENT_ATTEMPTS):
            policy = EnginePolicy(self._engine, request.temperature, name, self._count_running)
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
        self._send(_failed(request, index, failed.cause, str(failed)))
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

    def _grown(self, group: int, index: int, start: int, rest: m.Partial) -> None:
        self._send(m.Grown(group=group, index=index, start=start, rest=rest))

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


def _failed(request: m.Generate, index: int, cause: str, reason: str) -> m.RolloutFailed:
    return m.RolloutFailed(
        group=request.group, index=index, prompt_id=request.prompt_id,
        evaluation=request.evaluation, cause=cause, reason=reason,
    )  # fmt: skip
