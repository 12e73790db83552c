"""Turns, tools and environments: the configuration section `rollout`."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from megatron_rl.section import Section


class RolloutSettings(Section):
    """Limits of rollouts with several turns; a single turn has those of `generation` alone."""

    max_turns: PositiveInt = 8
    """Turns of the policy; a rollout that needs more is truncated."""
    max_tokens: PositiveInt | None = None
    """Longest sequence of a rollout: prompt, tools, all turns, and what is given between them.
    Default: `max_turns` times a turn and a result, after `generation.max_prompt_tokens`."""
    seconds: PositiveFloat = 600.0
    """Longest time of one rollout; one that takes longer has failed."""
    attempts: PositiveInt = 3
    """Times that a rollout is made before it is dropped, because its tools, its environment or its
    agent failed."""
    history: Literal["refuse", "split"] = "refuse"
    """For chat templates that change earlier turns when another one follows (they remove its
    thinking): `refuse` ends the run at its start; `split` trains what follows such a change as a
    sequence of its own."""
    tool_parser: str = "hermes"
    """vLLM's parser of the model's tool calls: `hermes` (Qwen), `llama3_json`, `llama4_pythonic`,
    ..."""
    tool_result_tokens: PositiveInt = 512
    """Longest result of a tool call, or answer of an environment; a longer one has failed."""
    environment_seconds: PositiveFloat = 60.0
    """Longest time of an environment's `reset` or `step`, or of a turn's tool calls."""
    workers: PositiveInt = 2
    """Processes of each generator for the tools or the environment of a task."""
