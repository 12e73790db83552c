"""The rule of forced-length interruption, without an engine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from megatron_rl.messages import Partial, VersionSpan, float_bytes, int_bytes, ints
from megatron_rl.rollouts.interruption import (
    BLOCK,
    Completion,
    EndMarker,
    Interruption,
    SampledTokens,
)

EOS, END = 2, 5
PHRASE = [8, 9, END]


class Words:
    """A tokenizer whose token n is the n-th of these strings."""

    vocabulary = ("x", "y", ".", "<E>", "</", "think", ">", ">\n", ".</", "</think>", "0")

    def __init__(self, *, whole: bool = False) -> None:
        self.whole = whole

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert text == "</think>"
        return [9] if self.whole else [4, 5, 6]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.vocabulary[i] for i in ids)


def one_token(ids: Sequence[int], searched: int = 0) -> int:
    assert END not in ids[:searched]
    return ids.index(END) + 1 if END in ids else -1


RULE = Interruption(PHRASE, one_token)
BUDGET, ANSWER = 10, 4


def generate(
    samples: Iterator[int], thinking: int = BUDGET, answer: int = ANSWER, version: int = 3
):
    """Return the completion of an engine that samples these tokens, one per step."""
    completion = Completion(thinking, answer, RULE)
    requests = 0
    while wanted := completion.wanted:
        tokens: list[int] = []
        while len(tokens) < wanted and EOS not in tokens:
            tokens.append(next(samples))
        span = VersionSpan(version, 0, len(tokens))
        reason = "stop" if tokens[-1] == EOS else "length"
        completion.add(SampledTokens(tokens, [-1.0] * len(tokens), [span], reason))
        requests += 1
        assert len(completion.token_ids) == len(completion.logprobs) == completion.spans[-1].end
    return completion, requests


def forever(*first: int) -> Iterator[int]:
    yield from first
    while True:
        yield 20


def test_thinking_that_never_ends_is_interrupted_after_exactly_the_budget():
    completion, requests = generate(forever(*[20] * 10, 21, 22, EOS))
    assert completion.token_ids == [20] * 10 + PHRASE + [21, 22, EOS]
    assert completion.forced == (10, 13)
    assert completion.logprobs[10:13] == [0.0] * 3
    assert (completion.finish_reason, requests) == ("stop", 2)


def test_an_interrupted_answer_has_at_most_the_answer_budget():
    completion, _ = generate(forever())
    assert len(completion.token_ids) == BUDGET + len(PHRASE) + ANSWER
    assert completion.finish_reason == "length"


def test_thinking_that_ends_before_the_budget_is_not_interrupted():
    completion, requests = generate(forever(20, 20, END, 21, EOS))
    assert completion.token_ids == [20, 20, END, 21, EOS]
    assert completion.forced == (0, 0)
    assert (completion.finish_reason, requests) == ("stop", 1)


def test_an_end_marker_as_the_last_token_of_the_budget_is_a_natural_end():
    completion, _ = generate(forever(*[20] * 9, END, 21, EOS))
    assert completion.token_ids == [*[20] * 9, END, 21, EOS]
    assert completion.forced == (0, 0)


def test_an_end_marker_right_after_the_budget_comes_too_late():
    completion, _ = generate(forever(*[20] * 10, END, EOS))
    assert completion.token_ids == [20] * 10 + PHRASE + [END, EOS]
    assert completion.forced == (10, 13)


def test_the_phrase_is_never_forced_twice():
    reopened, _ = generate(forever(20, END, 21, 4, 20, 20))
    assert reopened.forced == (0, 0)
    interrupted, _ = generate(forever(*[20] * 10, 4, 20))
    assert interrupted.token_ids.count(END) == 1


def test_the_answer_after_a_natural_end_may_outlast_the_thinking_budget():
    # Ended at token 8 of 10: 2 tokens of the answer are inside the budget, 2 more are allowed.
    completion, requests = generate(forever(*[20] * 7, END))
    assert completion.token_ids == [*[20] * 7, END, 20, 20, 20, 20]
    assert (completion.finish_reason, requests) == ("length", 2)


def test_an_answer_longer_than_its_budget_is_cut_and_truncated():
    # The engine may sample up to the thinking budget in one request.
    completion, requests = generate(forever(20, END, *[21] * 6, EOS))
    assert completion.token_ids == [20, END, 21, 21, 21, 21]
    assert completion.spans == [VersionSpan(3, 0, 6)]
    assert (completion.finish_reason, requests) == ("length", 1)


def test_a_completion_without_an_end_marker_can_stop_by_itself():
    completion, _ = generate(forever(20, 21, EOS))
    assert (completion.token_ids, completion.finish_reason) == ([20, 21, EOS], "stop")


def test_version_spans_are_joined_and_cover_forced_tokens():
    completion = Completion(4, 3, RULE)
    spans = [VersionSpan(1, 0, 1), VersionSpan(2, 1, 4)]
    completion.add(SampledTokens([20] * 4, [-1.0] * 4, spans, "length"))
    completion.add(
        SampledTokens([21, EOS], [-1.0] * 2, [VersionSpan(2, 0, 1), VersionSpan(3, 1, 2)], "stop")
    )
    assert completion.spans == [VersionSpan(1, 0, 1), VersionSpan(2, 1, 8), VersionSpan(3, 8, 9)]
    assert completion.forced == (4, 7)


@pytest.mark.parametrize(
    ("logprobs", "spans"),
    [
        ([-1.0], [VersionSpan(0, 0, 2)]),
        ([-1.0, -1.0], [VersionSpan(0, 0, 1)]),
        ([-1.0, -1.0], [VersionSpan(0, 0, 1), VersionSpan(1, 0, 2)]),
        ([-1.0, -1.0], []),
    ],
)
def test_lengths_that_disagree_are_refused(logprobs, spans):
    with pytest.raises(ValueError, match="lengths must agree"):
        Completion(4, 3, RULE).add(SampledTokens([20, 20], logprobs, spans, "length"))


def generate_freely(samples: Iterator[int]) -> Completion:
    completion = Completion(BUDGET, ANSWER, None)
    while wanted := completion.wanted:
        tokens: list[int] = []
        while len(tokens) < wanted and EOS not in tokens:
            tokens.append(next(samples))
        reason = "stop" if tokens[-1] == EOS else "length"
        completion.add(
            SampledTokens(tokens, [-1.0] * len(tokens), [VersionSpan(3, 0, len(tokens))], reason)
        )
    return completion


def test_without_a_phrase_thinking_and_answer_share_one_budget():
    completion = generate_freely(forever(*[20] * 12, EOS))
    assert completion.token_ids == [20] * 12 + [EOS]
    assert (completion.forced, completion.finish_reason) == ((0, 0), "stop")


def test_without_a_phrase_a_completion_that_uses_the_budget_up_is_truncated():
    completion = generate_freely(forever(20, END))
    assert len(completion.token_ids) == BUDGET + ANSWER
    assert (completion.forced, completion.finish_reason) == ((0, 0), "length")


@pytest.mark.parametrize("before", [0, 1, BLOCK - 3, BLOCK - 2, BLOCK - 1, BLOCK, 3 * BLOCK + 17])
@pytest.mark.parametrize("marker", [(4, 5, 6), (4, 5, 7), (8, 5, 6), (9,)])
def test_a_marker_of_several_tokens_is_found_however_it_is_spelt(before, marker):
    ids = [0] * before + [*marker, 1, 4, 5, 6, 0]
    assert EndMarker("</think>", Words()).end(ids) == before + len(marker)
    assert EndMarker("</think>", Words()).end([*ids[:before], 4, 5, 1, 6]) == -1
    assert EndMarker("</think>", Words()).end([]) == -1


def test_a_marker_of_one_token_is_that_token_alone():
    marker = EndMarker("</think>", Words(whole=True))
    assert marker.end([0, 4, 5, 6, 9, 0]) == 5
    assert marker.ends([0, 9])
    assert not marker.ends([4, 5, 6])


def test_the_rule_holds_for_a_marker_of_several_tokens():
    marker = EndMarker("</think>", Words())
    rule = Interruption([0, 4, 5, 6], marker.end)
    assert marker.ends(rule.phrase)

    def grown(*pieces: tuple[list[int], str]) -> Completion:
        completion = Completion(5, 2, rule)
        for ids, reason in pieces:
            span = VersionSpan(0, 0, len(ids))
            completion.add(SampledTokens(ids, [-1.0] * len(ids), [span], reason))
        return completion

    natural = grown(([1, 8, 5, 7, 10], "length"))
    assert (natural.forced, natural.wanted, natural.finish_reason) == ((0, 0), 1, "")
    cut = grown(([4, 5, 6, 1, 1], "length"))
    assert (cut.token_ids, cut.finish_reason) == ([4, 5, 6, 1, 1], "length")
    # The budget ends within a marker: it was not sampled to its end, and the phrase closes.
    within = grown(([1, 1, 1, 4, 5], "length"), ([10, 3], "stop"))
    assert within.token_ids == [1, 1, 1, 4, 5, *rule.phrase, 10, 3]
    assert (within.forced, within.finish_reason) == ((5, 9), "stop")


def continued(
    begun: Partial | None,
    rule: Interruption | None,
    thinking: int,
    answer: int,
    seed: int,
    every: int,
) -> tuple[Completion, list[tuple[int, Partial]]]:
    """Return a completion whose token depends on its place alone, and what is told as it grows.

    The sampler ends it with `EOS` at places that the seed decides; weights change every 7 tokens.
    """
    completion = Completion(thinking, answer, rule)
    if begun is not None:
        completion.begin(begun)
    reports, reported = [], 0 if begun is None else begun.num_tokens

    def sample(place: int) -> int:
        rng = random.Random(1000 * seed + place)
        return EOS if rng.random() < 0.02 else rng.choice(TOKENS)

    while wanted := completion.wanted:
        first = len(completion.token_ids)
        ids: list[int] = []
        while len(ids) < wanted and EOS not in ids:
            ids.append(sample(first + len(ids)))
        reason = "stop" if ids[-1] == EOS else "length"
        for start in range(0, len(ids), every):
            piece = ids[start : start + every]
            places = range(first + start, first + start + len(piece))
            spans = [VersionSpan(p // 7, i, i + 1) for i, p in enumerate(places)]
            end = reason if start + every >= len(ids) else ""
            completion.add(SampledTokens(piece, [-1.0 - p for p in places], spans, end))
            if not completion.wanted:
                break
            reports.append((reported, completion.since(reported)))
            reported = len(completion.token_ids)
    return completion, reports


def partial(ids, logprobs, spans, forced) -> Partial:
    return Partial(int_bytes(ids), float_bytes(logprobs), spans, forced)


def cut(completion: Completion, count: int) -> Partial:
    start, end = completion.forced
    spans = [VersionSpan(s.version, s.start, min(s.end, count)) for s in completion.spans]
    return partial(
        completion.token_ids[:count],
        completion.logprobs[:count],
        [s for s in spans if s.start < count],
        (start, min(end, count)) if start < count else (0, 0),
    )


TOKENS = [0, 1, 1, 1, 4, 4, 5, 5, 6, 6, 7, 8]
LONGER = Interruption([3, 10, 3, 10, 7], lambda ids, _: ids.index(7) + 1 if 7 in ids else -1)
SPELT = Interruption([0, 1, 4, 5, 6], EndMarker("</think>", Words()).end)


@pytest.mark.parametrize("rule", [LONGER, SPELT, None])
def test_a_completion_that_is_cut_anywhere_goes_on_as_if_it_had_not_been(rule):
    kinds: set[str] = set()
    for seed in range(60):
        rng = random.Random(seed)
        thinking, answer = rng.randint(1, 40), rng.randint(1, 25)
        whole, _ = continued(None, rule, thinking, answer, seed, every=10**6)
        natural = rule is not None and not whole.forced[1] and rule.end(whole.token_ids, 0) > 0
        thought = "interrupted" if whole.forced[1] else "ended" if natural else "open"
        kinds |= {whole.finish_reason, thought}
        for count in range(len(whole.token_ids)):
            begun, every = cut(whole, count), rng.randint(1, 9)
            again, reports = continued(begun, rule, thinking, answer, seed, every)
            for name in "token_ids", "logprobs", "spans", "forced", "finish_reason":
                assert getattr(again, name) == getattr(whole, name), (name, seed, count)
            # What was told on the way is the completion's own, without gaps.
            ids = ints(begun.token_ids).tolist()
            for start, rest in reports:
                assert start == len(ids)
                ids += ints(rest.token_ids).tolist()
                upto = cut(whole, len(ids))
                ids_bytes, logprobs = upto.token_ids[4 * start :], upto.logprobs[4 * start :]
                assert rest == Partial(ids_bytes, logprobs, upto.spans, upto.forced)
            assert whole.token_ids[: len(ids)] == ids
    assert kinds == {"stop", "length", "open"} | ({"interrupted", "ended"} if rule else set())


@pytest.mark.parametrize(
    "begun",
    [
        partial([20] * 3, [-1.0] * 2, [VersionSpan(0, 0, 3)], (0, 0)),
        partial([20] * 3, [-1.0] * 3, [VersionSpan(0, 0, 2)], (0, 0)),
        partial([20] * 3, [-1.0] * 3, [], (0, 0)),
        partial([20] * 11, [-1.0] * 11, [VersionSpan(0, 0, 11)], (0, 0)),  # past the budget
        partial([END] + [20] * 5, [-1.0] * 6, [VersionSpan(0, 0, 6)], (0, 0)),  # past the answer's
        partial([20] * 10 + [8, 7], [-1.0] * 12, [VersionSpan(0, 0, 12)], (10, 12)),
        partial([20] * 8 + PHRASE, [-1.0] * 11, [VersionSpan(0, 0, 11)], (8, 11)),
        partial([20] * 10 + [8, 9, 7], [-1.0] * 13, [VersionSpan(0, 0, 13)], (10, 12)),
    ],
)
def test_a_beginning_under_another_rule_is_refused(begun):
    with pytest.raises(ValueError, match="no beginning under thinking budget 10"):
        Completion(BUDGET, ANSWER, RULE).begin(begun)


@pytest.mark.parametrize("searched", [0, 1, 60, BLOCK, 100])
def test_a_marker_is_found_when_a_part_without_one_was_searched_before(searched):
    for whole in (False, True):
        marker = EndMarker("</think>", Words(whole=whole))
        ids = [0] * 98 + [4, 5, 6, 1] if not whole else [0] * 100 + [9, 1]
        assert marker.end(ids, searched) == 101
        assert marker.end(ids[:100], searched) == -1
