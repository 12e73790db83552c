"""The rollout functions that a task can name (`task.rollout`)."""

from contextlib import AsyncExitStack
from importlib import import_module
from typing import Any

from megatron_rl.config import RunConfig
from megatron_rl.rollouts.rollout import RolloutFunction
from megatron_rl.rollouts.single_turn import single_turn

SINGLE_TURN = "single_turn"
ENVIRONMENTS = ("tools", "environment")


async def rollout_function(
    config: RunConfig, task: str, tokenizer: Any, stack: AsyncExitStack
) -> RolloutFunction:
    """Return the rollout function of a task; an evaluation set, which is none, has single turns.

    What it needs is started, and ends with `stack`.

    Raises:
        ValueError: no such function, or the chat template does not keep earlier turns.
        RolloutError: the environment cannot be started.
    """
    name = config.tasks[task].rollout if task in config.tasks else SINGLE_TURN
    if name == SINGLE_TURN:
        return single_turn
    if name in ENVIRONMENTS:
        from megatron_rl.rollouts.environment import EnvironmentRollouts

        return await stack.enter_async_context(EnvironmentRollouts(config, task, tokenizer))
    module, _, attribute = name.partition(":")
    try:
        function: RolloutFunction = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        raise ValueError(
            f"{config.task_key(task)}.rollout is {name!r}: {e}; give {SINGLE_TURN},"
            f" {', '.join(ENVIRONMENTS)}, or the import path `package.module:function` of a rollout"
            " function that the generators can import"
        ) from e
    return function
