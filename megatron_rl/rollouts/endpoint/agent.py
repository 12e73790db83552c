"""`rollout: agent`: a function of the user that talks with the policy by an OpenAI client."""

import asyncio
import inspect
import math
from collections.abc import Callable
from typing import Any

from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.rollouts.endpoint.server import Endpoint
from megatron_rl.rollouts.rollout import Rollout, RolloutError, RolloutPolicy, RolloutPrompt

Agent = Callable[[str, str, dict[str, Any]], Any]
"""`(base_url, api_key, row) -> float | bool | None | Verdict`, a coroutine function or a plain one.
Its value is the reward; None: the task's verifier judges the last turn."""


class AgentRollout:
    """The rollout function that runs an agent against the endpoint.

    An agent gives its client a `timeout` and `max_retries` of its own (the OpenAI client waits ten
    minutes and retries twice by default); a request that is retried gets the answer that it had.
    The whole has `rollout.seconds`. A plain function runs in a thread, which cannot be killed: it
    goes on after its time is up, its session refuses all further requests, and its value is
    ignored; one that never returns keeps a thread of asyncio's pool, which has a few more than the
    machine has cores, so that many rollouts at once want a coroutine function.
    """

    def __init__(self, agent: Agent, endpoint: Endpoint) -> None:
        self._agent, self._endpoint = agent, endpoint

    async def __call__(self, prompt: RolloutPrompt, policy: RolloutPolicy) -> Rollout:
        """Run the agent on one row.

        An agent that fails after it was refused a request because the budgets of turns or tokens
        are used up has not failed: its rollout is truncated, and the verifier judges it.

        Raises:
            RolloutError: the agent raised, ran out of time, made no request or returned something
                else than a reward; or its conversation cannot be trained.
        """
        session = self._endpoint.open(policy, prompt.limits)
        seconds = self._endpoint.settings.seconds
        url, reward, error = self._endpoint.base_url(session), None, None
        try:
            async with asyncio.timeout(seconds) as limit:
                reward = await self._call(url, session.id, prompt.row)
        except Exception as e:  # noqa: BLE001 - whatever an agent can raise; told below
            error = e
        finally:
            self._endpoint.close(session)
        if session.failure is not None:
            raise session.failure
        name = getattr(self._agent, "__qualname__", repr(self._agent))
        if limit.expired():
            raise RolloutError(
                "timed out", f"agent {name} ran longer than {seconds:g} s (rollout.seconds)"
            ) from error
        if error is not None and not session.used_up:
            raise RolloutError(
                "raised", f"agent {name} raised {type(error).__name__}: {error}"
            ) from error
        if not session.rollout.turns:
            raise RolloutError("no request", f"agent {name} ended without a turn of the policy")
        session.rollout.verdict = _verdict(reward, name)
        return session.rollout

    async def _call(self, url: str, key: str, row: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._agent):
            return await self._agent(url, key, row)
        return await asyncio.to_thread(self._agent, url, key, row)


def _verdict(reward: Any, name: str) -> Verdict | None:
    """Return the verdict of an agent's value."""
    if reward is None or isinstance(reward, Verdict):
        return reward
    if isinstance(reward, bool):
        return Verdict(Outcome.CORRECT if reward else Outcome.WRONG, f"agent: {reward}")
    if isinstance(reward, int | float) and math.isfinite(reward):
        outcome = Outcome.CORRECT if reward > 0 else Outcome.WRONG
        return Verdict(outcome, f"agent: {reward:g}", float(reward))
    raise RolloutError(
        "raised",
        f"agent {name} returned {reward!r}; give a finite number, a bool, None or a Verdict",
    )
