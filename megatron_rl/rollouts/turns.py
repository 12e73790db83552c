"""Rollouts of several turns: the policy speaks, something answers, until one of them ends it."""

from collections.abc import Awaitable, Callable

from megatron_rl.config.rollout_settings import RolloutSettings
from megatron_rl.messages import TurnLimits
from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.rollouts.chat import ChatTemplate, History, Message, Tools
from megatron_rl.rollouts.environments.protocol import Step
from megatron_rl.rollouts.rollout import Rollout, RolloutError, RolloutPolicy


async def converse(
    messages: list[Message],
    tools: Tools,
    *,
    policy: RolloutPolicy,
    limits: TurnLimits,
    template: ChatTemplate,
    settings: RolloutSettings,
    parse: Callable[[list[int]], Message],
    respond: Callable[[Message], Awaitable[Step]],
) -> Rollout:
    """Have the policy speak after these messages, and after each reply, until it is over.

    A turn that reaches its limits, `rollout.max_turns` or the longest sequence ends the rollout as
    truncated, with the rewards that it has by then.

    RolloutError: the reply failed or is longer than `rollout.tool_result_tokens`, or the question
    with its tools leaves no space; HistoryError: the chat template does not keep the history.
    """
    history, rollout = History(template, messages, tools), Rollout()
    add, new, context = rollout.prompt, history.prompt, list(history.prompt)
    rewards, reason = list[float | None](), ""
    for _ in range(settings.max_turns):
        space = policy.max_tokens - 1 - len(context)
        if (own := fitting(limits, space - policy.forced_tokens)) is None:
            break
        turn = await policy.generate(context, own)
        add(new)
        rollout.add(turn)
        if turn.finish_reason == "length":
            break
        message = parse(turn.token_ids)
        reply = await respond(message)
        rollout.tool_calls += len(message.get("tool_calls") or [])
        rewards.append(reply.reward)
        reason = reply.reason or reason
        if reply.done:
            return _rewarded(rollout, rewards, reason)
        _check_length(reply.messages, template, settings.tool_result_tokens)
        history.answer(turn.token_ids, message)
        extension = history.extend(reply.messages)
        new = extension.token_ids
        add = rollout.prompt if extension.starts_over else rollout.give
        context = [*([] if extension.starts_over else context + turn.token_ids), *new]
    if not rollout.turns:
        raise RolloutError(
            "no space",
            f"the question with its tools has {len(context)} tokens, and a sequence at most"
            f" {policy.max_tokens}: raise rollout.max_tokens",
        )
    rollout.finish_reason = "length"
    return _rewarded(rollout, rewards, reason)


def _rewarded(rollout: Rollout, rewards: list[float | None], reason: str) -> Rollout:
    """Give the rollout the rewards of its turns, if there are any."""
    if any(reward is not None for reward in rewards):
        rollout.turn_rewards = [reward or 0.0 for reward in rewards]
        rollout.turn_rewards += [0.0] * (rollout.turns - len(rewards))
        total = sum(rollout.turn_rewards)
        outcome = Outcome.CORRECT if total > 0 else Outcome.WRONG
        rollout.verdict = Verdict(outcome, reason, total)
    return rollout


def fitting(limits: TurnLimits, space: int) -> TurnLimits | None:
    """Return the limits of a turn that has so much space; None if there is none for it.

    Thinking is cut before the answer, down to one token: the interruption rule begins with it.
    """
    if limits.thinking + limits.answer <= space:
        return limits
    least = min(limits.thinking, 1)
    if space <= least:
        return None
    answer = min(limits.answer, space - least)
    return TurnLimits(space - answer, answer)


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
