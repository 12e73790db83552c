"""Rollouts in an environment, and with tools, which are one."""

from functools import partial
from typing import Any

from megatron_rl.config import RunConfig
from megatron_rl.rollouts.chat import ChatTemplate, Tools
from megatron_rl.rollouts.environments.host import EnvironmentHost
from megatron_rl.rollouts.rollout import Rollout, RolloutPolicy, RolloutPrompt
from megatron_rl.rollouts.tool_calls import CallParser
from megatron_rl.rollouts.tool_environment import PATH, load_tool
from megatron_rl.rollouts.turns import converse

CUT_TOKENS = 32


class EnvironmentRollouts(EnvironmentHost):
    """The rollout function of a task with an environment: `async with ... as function`.

    ValueError: a tool cannot be imported or has no schema, or the chat template changes earlier
    turns, and `rollout.history` is `refuse`.
    """

    def __init__(self, config: RunConfig, task: str, tokenizer: Any) -> None:
        settings, self._rollout = config.tasks[task], config.rollout
        path, options = settings.environment, settings.environment_options
        tools: Tools = []
        if settings.rollout == "tools":
            sandbox = config.verifier.sandbox.model_dump(mode="json")
            # A token is at least one character; the last ones say how much was cut.
            characters = max(self._rollout.tool_result_tokens - CUT_TOKENS, 1)
            options = {
                "tools": list(settings.tools),
                "sandbox": sandbox,
                "output_characters": characters,
            }
            path, limits = PATH, (config.verifier.sandbox, characters)
            tools = [load_tool(tool, *limits).schema for tool in settings.tools]
        super().__init__(path, options, self._rollout)
        think_start = config.generation.think_start
        self._template = ChatTemplate(tokenizer, self._rollout.history, think_start)
        self._template.check(tools)
        self._parser = CallParser(self._rollout.tool_parser, tokenizer)
        self._parser([], tools)  # which vLLM may not know

    async def __call__(self, prompt: RolloutPrompt, policy: RolloutPolicy) -> Rollout:
        """Have the policy act in one episode."""
        async with self.episode(prompt.row) as episode:
            opening = await episode.reset()
            return await converse(
                opening.messages,
                opening.tools,
                policy=policy,
                limits=prompt.limits,
                template=self._template,
                settings=self._rollout,
                parse=partial(self._parser, tools=opening.tools),
                respond=episode.step,
            )
