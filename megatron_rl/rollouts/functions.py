"""The rollout functions that a task can name (`task.rollout`)."""

from contextlib import AsyncExitStack
from typing import Any

from megatron_rl.config import RunConfig
from megatron_rl.import_path import imported
from megatron_rl.rollouts.rollout import Rollout, RolloutFunction, RolloutPolicy, RolloutPrompt


async def single_turn(prompt: RolloutPrompt, policy: RolloutPolicy) -> Rollout:
    """Sample one turn, as ScaleRL does; go on with what another engine had begun."""
    rollout = Rollout()
    rollout.add(
        await policy.generate(
            prompt.token_ids, prompt.limits, begun=prompt.begun, grown=prompt.grown
        )
    )
    return rollout


async def rollout_function(
    config: RunConfig, task: str, tokenizer: Any, stack: AsyncExitStack
) -> RolloutFunction:
    """Return the rollout function of a task; an evaluation set, which is none, has single turns.

    What it needs is started, and ends with `stack`. ValueError: no such function, or the chat
    template does not keep earlier turns; RolloutError: the environment cannot be started.
    """
    if task not in config.tasks or config.tasks[task].is_single_turn:
        return single_turn
    name = config.tasks[task].rollout
    if name in ("tools", "environment"):
        from megatron_rl.rollouts.environment import EnvironmentRollouts

        return await stack.enter_async_context(EnvironmentRollouts(config, task, tokenizer))
    key = config.task_key(task)
    if name == "agent":
        from megatron_rl.rollouts.endpoint.agent import AgentRollout
        from megatron_rl.rollouts.endpoint.server import Endpoint

        agent = _imported(config.tasks[task].agent, f"{key}.agent")
        g = config.generation
        endpoint = Endpoint(config.rollout, temperature=g.temperature, think_start=g.think_start)
        await endpoint.start()
        stack.push_async_callback(endpoint.stop)
        return AgentRollout(agent, endpoint)
    function: RolloutFunction = _imported(name, f"{key}.rollout")
    return function


def _imported(path: str, key: str) -> Any:
    try:
        return imported(path)
    except ValueError as e:
        raise ValueError(f"{key} is {e}") from e
