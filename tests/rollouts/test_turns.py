"""Rollouts of several turns: tokens, limits, tools and their failures."""

from __future__ import annotations

import asyncio
import string
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from megatron_rl.config import RunConfig
from megatron_rl.config.rollout_settings import RolloutSettings
from megatron_rl.data.lookup import lookup
from megatron_rl.data.prompt_format import TOOL_TEMPLATE, save_tiny_tokenizer
from megatron_rl.messages import Segment, TurnLimits, VersionSpan
from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.rollouts.chat import ChatTemplate
from megatron_rl.rollouts.environment import EnvironmentRollouts
from megatron_rl.rollouts.environments import Step
from megatron_rl.rollouts.interruption import Completion
from megatron_rl.rollouts.rollout import Rollout, RolloutError, RolloutPrompt
from megatron_rl.rollouts.turns import converse, fitting

CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "%s"}}</tool_call><eos>'
LOOKUP = "megatron_rl.data.lookup:lookup"
LIMITS = TurnLimits(1, 200)
FAULTS = "tests.rollouts.tool_functions"


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each character, with the chat template of the tiny models with tools."""
    vocabulary = {c: i for i, c in enumerate(("<pad>", "<bos>", "<eos>", *string.printable))}
    one = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    one.pre_tokenizer, one.decoder = Split(pattern="", behavior="isolated"), Fuse()
    one.add_special_tokens([AddedToken(t, special=True) for t in ("<pad>", "<bos>", "<eos>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=one, bos_token="<bos>", eos_token="<eos>", chat_template=TOOL_TEMPLATE
    )


class Script:
    """A policy that says these texts, by one weight version after the other."""

    def __init__(self, tokenizer, *texts, max_tokens=1000):
        self.tokenizer, self.texts, self.max_tokens = tokenizer, list(texts), max_tokens
        self.forced_tokens, self.contexts, self.limits = 0, [], []

    async def generate(self, token_ids, limits, *, begun=None, grown=None):
        self.contexts.append(list(token_ids))
        self.limits.append(limits)
        ids = self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False)
        reason = "stop" if len(ids) <= limits.thinking + limits.answer else "length"
        ids = ids[: limits.thinking + limits.answer]
        return SimpleNamespace(
            token_ids=ids, logprobs=[-0.5] * len(ids), forced=(0, 0), finish_reason=reason,
            spans=[VersionSpan(len(self.contexts), 0, len(ids))], routes_NLK=None,
        )  # fmt: skip


def config(tools=(LOOKUP,), **rollout):
    settings = {"workers": 1, "environment_seconds": 10, "tool_result_tokens": 100, **rollout}
    return RunConfig.model_validate(
        {
            "model": "tiny_dense",
            "task": {"kind": "lookup", "tools": list(tools)},
            "generation": {"think_start": ""},
            "rollout": settings,
        }
    )


def play(one, policy, question="2;4733?", limits=LIMITS, repeats=1):
    """Return the rollouts of a question, or what they raised."""

    async def main():
        row = {"messages": [{"role": "user", "content": question}], "gold": "", "meta": {}}
        async with EnvironmentRollouts(one, "lookup", policy.tokenizer) as rollout:
            prompt = RolloutPrompt([], limits, "lookup", row)
            calls = [rollout(prompt, policy) for _ in range(repeats)]
            return [(await asyncio.gather(call, return_exceptions=True))[0] for call in calls]

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_three_turns_are_one_sequence_whose_ids_are_never_encoded_again(tokenizer):
    first = lookup("4733")
    policy = Script(tokenizer, CALL % 4733, CALL % first, "\\boxed{7}<eos>")
    (rollout,) = play(config(), policy)
    assert rollout.finish_reason == "stop" and rollout.tool_calls == 2 and rollout.turns == 3
    text = tokenizer.decode(rollout.token_ids)
    given = [f"<tool_response>{n}</tool_response>" for n in (first, lookup(first))]
    turns = [CALL % 4733, given[0], CALL % first, given[1], "\\boxed{7}<eos>"]
    assert text == "".join(["<bos>2;4733?", *turns])
    assert [s.kind for s in rollout.segments] == ["prompt", *["sampled", "given"] * 2, "sampled"]
    for context, later in zip(policy.contexts, policy.contexts[1:], strict=False):
        assert later[: len(context)] == context
    ends = [s.start for s in rollout.segments if s.kind == "sampled"]
    assert policy.contexts == [rollout.token_ids[:end] for end in ends]
    for segment in rollout.segments:
        values = {rollout.logprobs[i] for i in range(segment.start, segment.end)}
        assert values == ({-0.5} if segment.kind == "sampled" else {0.0})
    assert [span.version for span in rollout.spans] == [1, 2, 3]
    assert rollout.spans[0].start == 0 and rollout.spans[-1].end == len(rollout.token_ids)


def test_a_policys_own_mistakes_are_told_to_it(tokenizer):
    wrong = CALL.replace("lookup", "find") % 1
    odd = CALL.replace("key", "name") % 1
    (rollout,) = play(config(), Script(tokenizer, wrong, odd, "\\boxed{7}<eos>"))
    assert rollout.finish_reason == "stop" and rollout.tool_calls == 2


def test_turns_and_tokens_end_a_rollout_as_truncated(tokenizer):
    calls = [CALL % n for n in (1000, 1001, 1002)]
    (rollout,) = play(config(max_turns=2), Script(tokenizer, *calls))
    assert rollout.finish_reason == "length" and rollout.turns == 2
    (rollout,) = play(config(), Script(tokenizer, *calls, max_tokens=150))
    assert rollout.finish_reason == "length" and len(rollout.token_ids) < 150
    (rollout,) = play(config(), Script(tokenizer, calls[0]), limits=TurnLimits(1, 2))
    assert rollout.finish_reason == "length" and rollout.turns == 1
    assert [s.kind for s in rollout.segments] == ["prompt", "sampled"]
    (failed,) = play(config(), Script(tokenizer, max_tokens=9))
    assert isinstance(failed, RolloutError) and "rollout.max_tokens" in str(failed)


def test_rewards_of_turns_make_the_verdict_of_a_rollout_also_of_a_truncated_one(tokenizer):
    async def play_rewards(rewards, max_turns):
        answer = [{"role": "user", "content": "2"}]
        replies = iter([Step(messages=answer, reward=r) for r in rewards])
        messages = [{"role": "user", "content": "1"}]

        async def respond(message):
            reply = next(replies, None)
            return reply or Step(done=True, reason="over")

        return await converse(
            messages, [], policy=Script(tokenizer, *["3<eos>"] * 4), limits=LIMITS,
            template=ChatTemplate(tokenizer), settings=RolloutSettings(max_turns=max_turns),
            parse=lambda ids: {"role": "assistant", "content": "3"}, respond=respond,
        )  # fmt: skip

    whole = asyncio.run(play_rewards([0.5, None, -2.0], 4))
    assert whole.turn_rewards == [0.5, 0.0, -2.0, 0.0] and whole.turns == 4
    assert whole.verdict == Verdict(Outcome.WRONG, "over", -1.5)
    cut = asyncio.run(play_rewards([0.5, None], 2))
    assert cut.finish_reason == "length" and cut.turn_rewards == [0.5, 0.0]
    assert cut.verdict is not None and cut.verdict.reward == 0.5
    without = asyncio.run(play_rewards([], 2))
    assert without.verdict is None and without.turn_rewards == []


def test_routed_experts_of_turns_are_joined_and_begin_again_with_a_sequence(tokenizer):
    def turn(tokens, inputs):
        routes = np.arange(inputs, dtype=np.int16).reshape(-1, 1, 1)
        span = [VersionSpan(0, 0, len(tokens))]
        return Completion(
            1, 9, None, tokens, [-1.0] * len(tokens), span, finish_reason="stop", routes_NLK=routes
        )

    rollout = Rollout()
    rollout.prompt([1, 2])
    rollout.add(turn([3, 4], 3))  # no request has its last token as an input
    rollout.give([5])
    rollout.add(turn([6], 5))
    rollout.prompt([7])
    rollout.add(turn([8, 9], 2))
    assert [routes[:, 0, 0].tolist() for routes in rollout.routes] == [[0, 1, 2, 3, 4], [0, 1]]


@pytest.mark.parametrize(
    ("limits", "space", "expected"),
    [
        (TurnLimits(10, 5), 15, TurnLimits(10, 5)),
        (TurnLimits(10, 5), 14, TurnLimits(9, 5)),
        (TurnLimits(10, 5), 3, TurnLimits(1, 2)),
        (TurnLimits(10, 5), 2, TurnLimits(1, 1)),
        (TurnLimits(10, 5), 1, None),
        (TurnLimits(0, 5), 4, TurnLimits(0, 4)),
        (TurnLimits(0, 5), 1, TurnLimits(0, 1)),
        (TurnLimits(0, 5), 0, None),
    ],
)
def test_a_turn_is_cut_to_the_space_that_is_left(limits, space, expected):
    assert fitting(limits, space) == expected


@pytest.mark.parametrize(
    ("tool", "cause"),
    [("raises", "raised"), ("hangs", "timed out"), ("dies", "died"), ("floods", "flooded")],
)
def test_a_tool_that_fails_fails_the_rollout_and_the_next_one_works(tokenizer, tool, cause):
    seconds = 4 if tool == "hangs" else 10
    one = config(tools=[LOOKUP, f"{FAULTS}:{tool}"], environment_seconds=seconds)
    call = CALL.replace("lookup", tool) % 1
    policy = Script(tokenizer, call, CALL % 4733, "\\boxed{7}<eos>")
    failed, done = play(one, policy, repeats=2)
    assert isinstance(failed, RolloutError) and failed.cause == cause, failed
    assert isinstance(done, Rollout), done
    assert done.tool_calls == 1 and done.finish_reason == "stop"


def test_a_tool_without_a_schema_ends_the_start_with_its_name(tokenizer):
    with pytest.raises(ValueError, match=f"{FAULTS}:nothing.*docstring"):
        play(config(tools=[f"{FAULTS}:nothing"]), Script(tokenizer, "1"))


def test_spans_of_given_tokens_belong_to_a_neighbor():
    rollout = Rollout()
    rollout.prompt([1, 2])
    turn = SimpleNamespace(
        token_ids=[3, 4, 5], logprobs=[-1.0, 0.0, -1.0], forced=(1, 2), finish_reason="stop",
        spans=[VersionSpan(7, 0, 2), VersionSpan(8, 2, 3)], routes_NLK=None,
    )  # fmt: skip
    rollout.add(turn)
    rollout.give([6])
    rollout.add(turn)
    kinds = ["prompt", "sampled", "forced", "sampled", "given", "sampled", "forced", "sampled"]
    assert [s.kind for s in rollout.segments] == kinds and rollout.turns == 2
    assert rollout.segments[4] == Segment("given", 5, 6)
    expected = [(7, 0, 4), (8, 4, 6), (7, 6, 8), (8, 8, 9)]
    assert [(s.version, s.start, s.end) for s in rollout.spans] == expected


def test_the_tokenizer_with_tools_has_the_ids_of_the_one_without(tmp_path):
    for name, tools in (("with", True), ("without", False)):
        (tmp_path / name).mkdir()
        save_tiny_tokenizer(tmp_path / name, tools=tools)
    more, less = (
        Tokenizer.from_file(str(tmp_path / n / "tokenizer.json")) for n in ("with", "without")
    )
    assert less.get_vocab().items() <= more.get_vocab().items()
