"""Rollouts of several turns: the policy speaks, something answers, until one of them ends it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.rollout_settings import RolloutSettings
from megatron_rl.messages import TurnLimits
from megatron_rl.rewards import Verdict
from megatron_rl.rollouts.chat import ChatTemplate, History, Message
from megatron_rl.rollouts.rollout import Rollout, RolloutError, RolloutPolicy


@dataclass(frozen=True, slots=True)
class TurnReply:
    """The answer to a turn of the policy."""

    messages: list[Message] = field(default_factory=list)
    """Messages for the policy, whose next turn follows."""
    done: bool = False
    """True if the turn was the last one."""
    verdict: Verdict | None = None
    """Of the whole rollout, at its end; None: the task's verifier judges the last turn."""
    tool_calls: int = 0
    """Calls that the turn made."""


Respond = Callable[[Message], Awaitable[TurnReply]]
Parse = Callable[[str, list[int]], Message]
"""(text of a turn with its special tokens, ids) -> the assistant's message."""


async def converse(
    messages: list[Message],
    tools: list[dict[str, Any]],
    *,
    policy: RolloutPolicy,
    limits: TurnLimits,
    template: ChatTemplate,
    settings: RolloutSettings,
    parse: Parse,
    respond: Respond,
) -> Rollout:
    """Have the policy speak after these messages, and after each reply, until it is over.

    A turn that reaches its limits, `rollout.max_turns` or the longest sequence ends the rollout as
    truncated.

    Raises:
        RolloutError: the reply failed, or is longer than `rollout.tool_result_tokens`.
        HistoryError: the chat template does not keep the history.
    """
    history, rollout = History(template, messages, tools), Rollout()
    rollout.prompt(history.prompt)
    context = list(history.prompt)
    for _ in range(settings.max_turns):
        space = policy.max_tokens - 1 - len(context)
        if (own := fitting(limits, space - policy.forced_tokens)) is None:
            break
        turn = await policy.generate(context, own)
        rollout.add(turn)
        context += turn.token_ids
        if turn.finish_reason == "length":
            return rollout
        text = policy.tokenizer.decode(turn.token_ids, skip_special_tokens=False)
        message = parse(text, turn.token_ids)
        reply = await respond(message)
        rollout.tool_calls += reply.tool_calls
        if reply.done:
            rollout.verdict = reply.verdict
            return rollout
        _check_length(reply.messages, template, settings.tool_result_tokens)
        history.answer(turn.token_ids, message)
        extension = history.extend(reply.messages)
        if extension.starts_over:
            rollout.prompt(extension.token_ids)
            context = list(extension.token_ids)
        else:
            rollout.give(extension.token_ids)
            context += extension.token_ids
    rollout.finish_reason = "length"
    return rollout


def fitting(limits: TurnLimits, space: int) -> TurnLimits | None:
    """Return the limits of a turn that has so much space; None if there is none for it."""
    if limits.thinking + limits.answer <= space:
        return limits
    if space < 2:
        return None
    answer = min(limits.answer, space - 1)
    return TurnLimits(min(limits.thinking, space - answer), answer)


def _check_length(messages: list[Message], template: ChatTemplate, longest: int) -> None:
    for message in messages:
        content = message.get("content") or ""
        count = len(template.encode(content if isinstance(content, str) else str(content)))
        if count > longest:
            raise RolloutError(
                "flooded",
                f"a message of the role {message.get('role')!r} has {count} tokens, and"
                f" rollout.tool_result_tokens = {longest}: raise it, or shorten the message",
            )
