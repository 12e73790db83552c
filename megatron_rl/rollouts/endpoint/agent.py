"""`rollout: agent`: a function of the user that talks with the policy by an OpenAI client."""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
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
    The whole has `rollout.seconds`. A plain function has a thread of its own, which cannot be
    killed: it goes on after its time is up, its session refuses all further requests, and its value
    is ignored. One that never returns keeps its thread up to the end of the process, and nothing
    waits for it.
    """

    def __init__(self, agent: Agent, endpoint: Endpoint) -> None:
        self._agent, self._endpoint = agent, endpoint

    async def __call__(self, prompt: RolloutPrompt, policy: RolloutPolicy) -> Rollout:
        """Run the agent on one row.

        An agent that fails after it was refused a request because the budgets of turns or tokens
        are used up has not failed: its rollout is truncated, and the verifier judges it.
        """
        session = self._endpoint.open(policy, prompt.limits)
        seconds = self._endpoint.settings.seconds
        url, reward = self._endpoint.base_url(session), None
        error: BaseException | None = None
        try:
            async with asyncio.timeout(seconds) as limit:
                reward = await self._call(url, session.id, prompt.row)
        except (Exception, SystemExit, asyncio.CancelledError) as e:  # whatever an agent can raise
            task = asyncio.current_task()
            if isinstance(e, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
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
        return await _in_own_thread(self._agent, url, key, row)


def _in_own_thread(function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
    """Call a function in a new thread, for which no one waits at the end of the process.

    A pool has an end of its threads, and the interpreter waits for them.
    """
    result: Future[Any] = Future()

    def call() -> None:
        try:
            result.set_result(function(*arguments))
        except BaseException as e:  # noqa: BLE001 - the one who waits has it
            result.set_exception(e)

    result.set_running_or_notify_cancel()  # so that no one cancels what goes on
    threading.Thread(target=call, name="agent", daemon=True).start()
    return asyncio.wrap_future(result)


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
