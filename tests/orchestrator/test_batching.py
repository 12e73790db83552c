import itertools

import numpy as np
import pytest
from msgspec import msgpack
from msgspec.structs import replace

from megatron_rl.config import Algorithm
from megatron_rl.messages import (
    Sample,
    Segment,
    VersionSpan,
    float_bytes,
    floats,
    int_bytes,
    ints,
)
from megatron_rl.orchestrator.batching import build_batch
from megatron_rl.orchestrator.groups import Group
from megatron_rl.orchestrator.state import SavedGroup, saved_groups
from megatron_rl.rewards import Outcome, Verdict
from tests.segments import segments


def sample(index, tokens, *, group=0, forced=(0, 0), spans=None, finish="stop"):
    return Sample(
        group=group,
        index=index,
        prompt_id=group,
        evaluation=-1,
        token_ids=int_bytes(range(10, 10 + tokens)),
        logprobs=float_bytes([-0.5 - index] * tokens),
        segments=segments(tokens, forced),
        spans=spans or [VersionSpan(3, 0, tokens)],
        finish_reason=finish,
    )


def group(index, samples, passed):
    g = Group(index, index, len(samples), "generator-0")
    for s, ok in zip(samples, passed, strict=True):
        g.samples[s.index] = s
        g.verdicts[s.index] = Verdict(Outcome.CORRECT if ok else Outcome.WRONG, "")
    return g


PROMPTS = {0: [1, 2], 1: [1, 2, 3], 2: [1]}


def build(groups, step=4, probe=0, **algorithm):
    return build_batch(step, groups, PROMPTS, Algorithm(**algorithm), probe=probe)


def test_weights_advantages_and_masks_of_a_hand_computed_batch():
    # one prompt, completions of 3 tokens (one of them forced) and 2: 4 sampled tokens
    g = group(0, [sample(0, 3, forced=(1, 2)), sample(1, 2)], [True, False])
    batch = build([g]).batch
    assert ints(batch.bounds).tolist() == [0, 5, 9]
    assert ints(batch.prompt_lengths).tolist() == [2, 2]
    assert ints(batch.prompt_ids).tolist() == [0, 0]
    assert ints(batch.completion_indices).tolist() == [0, 1]
    assert ints(batch.token_ids).tolist() == [1, 2, 10, 11, 12, 1, 2, 10, 11]
    w = 1 / 4
    assert floats(batch.loss_weights).tolist() == [0, 0, w, 0, w, 0, 0, w, w]
    # rewards +1, -1: centered 1, -1, std 1
    assert floats(batch.advantages) == pytest.approx([0, 0, 1, 1, 1, 0, 0, -1, -1], abs=1e-5)
    assert floats(batch.generator_logprobs).tolist() == [0, 0, -0.5, -0.5, -0.5, 0, 0, -1.5, -1.5]
    assert ints(batch.versions).tolist() == [-1, -1, 3, -1, 3, -1, -1, 3, 3]


def test_graded_rewards_are_the_batchs_and_are_saved_with_it():
    g = group(0, [sample(0, 3), sample(1, 2), sample(2, 2)], [True, False, False])
    for index, reward in ((0, 0.9), (1, 0.3), (2, None)):
        g.verdicts[index] = replace(g.verdicts[index], reward=reward)
    batch = build([g], advantage_normalization="none").batch
    # 0.9, 0.3 and the outcome's own -1; their mean is 1 / 15
    wanted = [0.0, 0.0, *[0.9 - 1 / 15] * 3, 0.0, 0.0, *[0.3 - 1 / 15] * 2, 0.0, 0.0]
    assert floats(batch.advantages) == pytest.approx([*wanted, *[-1 - 1 / 15] * 2], abs=1e-6)
    (saved,) = msgpack.decode(msgpack.encode(saved_groups([g])), type=list[SavedGroup])
    assert saved.verdicts == g.verdicts


def test_routes_follow_their_sequences():
    # one byte per token of prompt and completion
    samples = [replace(sample(0, 3), routes=[b"abcde"]), replace(sample(1, 2), routes=[b"uvwx"])]
    assert build([group(0, samples, [True, False])]).batch.routes == [b"abcde", b"uvwx"]
    turns = several_turns(1, "sampled", "prompt", "sampled")
    samples[1] = replace(turns, routes=[b"uvw", b"xyz"])
    assert build([group(0, samples, [True, False])]).batch.routes == [b"abcde", b"uvw", b"xyz"]


def test_with_credit_by_turn_each_turn_has_the_rewards_from_it_on_as_its_own():
    samples = [several_turns(i, "sampled", "given", "sampled") for i in range(3)]
    samples.append(several_turns(3, "sampled"))
    totals, of_turns = [3.0, 3.0, 0.0, 6.0], [[1.0, 2.0], [3.0, 0.0], [0.0, 0.0], [6.0]]
    samples = [replace(s, turn_rewards=r) for s, r in zip(samples, of_turns, strict=True)]
    g = group(0, samples, [True] * 4)
    for i, total in enumerate(totals):
        g.verdicts[i] = replace(g.verdicts[i], reward=total)
    options = {"advantage_normalization": "none", "credit": "turn"}
    built = build([g], **options)
    # Of 3, 3, 0, 6 the mean is 3; of the second turns, which three have, 2, 0, 0: 2 / 3.
    third = 1 / 3
    assert {i: a for (_, i), (a, _) in built.trained.items()} == {
        0: pytest.approx((0, 4 * third)), 1: pytest.approx((0, -2 * third)),
        2: pytest.approx((-3, -2 * third)), 3: pytest.approx((3,)),
    }  # fmt: skip
    values = floats(built.batch.advantages).tolist()
    assert values[:8] == pytest.approx([*[0] * 6, *[4 * third] * 2])
    whole = build([g], advantage_normalization="none")
    assert floats(whole.batch.advantages)[:8].tolist() == [0] * 8
    # The same rewards of the wholes, but not at the same turns.
    differing = group(0, samples[:2], [True] * 2)
    for i in range(2):
        differing.verdicts[i] = g.verdicts[i]
    assert build([differing], **options).kept and not build([differing]).kept


def test_zero_variance_prompts_are_dropped_and_the_mean_is_over_the_others():
    kept = group(0, [sample(0, 2), sample(1, 2)], [True, False])
    dropped = group(1, [sample(0, 2, group=1), sample(1, 2, group=1)], [True, True])
    built = build([kept, dropped])
    assert len(ints(built.batch.prompt_lengths)) == 2
    assert floats(built.batch.loss_weights).sum() == pytest.approx(1.0)
    assert built.metrics["prompts_dropped_zero_variance"] == 1
    assert built.metrics["prompt_ids"] == [0, 1]
    unfiltered = build([kept, dropped], zero_variance_filter=False)
    assert len(ints(unfiltered.batch.prompt_lengths)) == 4


def test_truncated_completions_are_excluded_from_loss_and_baseline():
    # without the truncated third one the rewards are +1, -1 and their mean 0
    samples = [sample(0, 2), sample(1, 2), sample(2, 9, finish="length")]
    built = build([group(0, samples, [True, False, False])])
    assert len(ints(built.batch.prompt_lengths)) == 2
    assert sorted(set(floats(built.batch.advantages).round(4).tolist())) == [-1, 0, 1]
    assert built.metrics["completions_truncated"] == 1


def test_a_batch_without_anything_to_learn_is_empty_and_valid():
    built = build([group(0, [sample(0, 2), sample(1, 2)], [True, True])], probe=4)
    assert ints(built.batch.bounds).tolist() == [0]
    assert built.batch.token_ids == b"" and built.batch.probe == [] and built.probe.prompts == []


def test_lag_counts_every_token_by_its_own_version():
    s = sample(0, 5, spans=[VersionSpan(1, 0, 2), VersionSpan(4, 2, 5)])
    built = build([group(0, [s, sample(1, 2)], [True, False])])
    # step 4: 2 tokens of version 1 (lag 3), 3 of version 4 (lag 0), 2 of version 3 (lag 1)
    assert built.metrics["lag_histogram"] == {"0": 3, "1": 2, "3": 2}
    assert built.metrics["lag_max"] == 3
    assert built.metrics["lag_mean"] == pytest.approx(8 / 7)
    assert built.metrics["multi_version_fraction"] == 0.5


def test_each_token_has_the_version_of_its_span():
    s = sample(0, 5, spans=[VersionSpan(1, 0, 2), VersionSpan(4, 2, 5)], forced=(3, 4))
    batch = build([group(0, [s, sample(1, 1)], [True, False])]).batch
    assert ints(batch.versions).tolist() == [-1, -1, 1, 1, 4, -1, 4, -1, -1, 3]


def test_spans_and_logprobs_must_cover_the_completion():
    gap = sample(0, 5, spans=[VersionSpan(1, 0, 2), VersionSpan(4, 3, 5)])
    end = sample(0, 5, spans=[VersionSpan(1, 0, 4)])
    short, odd = (replace(sample(0, 5), logprobs=bytes(n)) for n in (16, 21))
    for s in gap, end, short, odd:
        with pytest.raises(ValueError, match="do not cover its 5 tokens"):
            build([group(0, [s, sample(1, 2)], [True, False])])


def test_the_probe_is_of_the_batchs_first_sequences():
    g = group(0, [sample(0, 2), sample(1, 3)], [True, False])
    built = build([group(1, [sample(0, 1), sample(1, 1)], [True, True]), g], probe=1)
    assert built.batch.probe == [0]
    (prompt,), (completion,) = built.probe.prompts, built.probe.completions
    row = slice(*ints(built.batch.bounds)[:2])
    assert [*prompt, *completion] == ints(built.batch.token_ids)[row].tolist()


def test_pad_equal_to_eos_changes_nothing_because_masks_come_from_lengths():
    a = sample(0, 3)
    b = Sample(
        **{f: getattr(a, f) for f in a.__struct_fields__} | {"token_ids": int_bytes([2, 0, 2])}
    )
    other = sample(1, 2)
    weights = [
        floats(build([group(0, [x, other], [True, False])]).batch.loss_weights).tolist()
        for x in (a, b)
    ]
    assert weights[0] == weights[1]
    assert np.count_nonzero(weights[0]) == 5


def test_masked_truncated_completions_count_in_the_baseline_and_are_not_trained():
    # rewards 1, -1, -1: mean -1/3, centered 4/3, -2/3 (and -2/3 of the truncated one)
    samples = [sample(0, 2), sample(1, 2), sample(2, 9, finish="length")]
    g = group(0, samples, [True, False, False])
    built = build([g], truncated="mask", advantage_normalization="none")
    assert len(ints(built.batch.prompt_lengths)) == 2
    advantages = floats(built.batch.advantages)[floats(built.batch.loss_weights) > 0]
    assert advantages == pytest.approx([4 / 3] * 2 + [-2 / 3] * 2)
    assert floats(built.batch.loss_weights).sum() == pytest.approx(1.0)


def test_truncated_completions_are_trained_where_that_is_wanted():
    samples = [sample(0, 2), sample(1, 2), sample(2, 9, finish="length")]
    built = build([group(0, samples, [True, False, False])], truncated="train")
    assert len(ints(built.batch.prompt_lengths)) == 3
    # the prompt mean is over all 13 tokens
    weights = floats(built.batch.loss_weights)
    assert weights[weights > 0] == pytest.approx([1 / 13] * 13)


@pytest.mark.parametrize(("truncated", "kept"), [("drop", 0), ("mask", 0), ("train", 2)])
def test_a_group_of_truncated_completions_teaches_nothing_unless_they_are_trained(truncated, kept):
    samples = [sample(i, 3, finish="length") for i in range(2)]
    built = build([group(0, samples, [True, False])], truncated=truncated)
    assert len(ints(built.batch.prompt_lengths)) == kept


def test_the_length_penalty_shapes_rewards_of_right_completions_or_of_all():
    # longest 10, cache 4: 6 tokens 0, 8 tokens -.5, 10 tokens -1
    samples = [sample(0, 8), sample(1, 6), sample(2, 10)]
    g = group(0, samples, [True, True, False])
    lengths = {"length_max_tokens": 10, "length_cache_tokens": 4}
    for over, rewards in (("right", [0.5, 1.0, -1.0]), ("all", [0.5, 1.0, -2.0])):
        built = build([g], length_penalty=over, advantage_normalization="none", **lengths)
        bounds = ints(built.batch.bounds)
        advantages = floats(built.batch.advantages)[bounds[1:] - 1]
        assert advantages == pytest.approx(np.array(rewards) - np.mean(rewards))
    assert built.metrics["length_penalty_mean"] == pytest.approx(-1.5 / 3)


def test_the_filter_looks_at_verified_rewards_and_not_at_penalties():
    # both right, one long: the shaped rewards differ, the verified ones don't
    g = group(0, [sample(0, 8), sample(1, 6)], [True, True])
    built = build([g], length_penalty="all", length_max_tokens=10, length_cache_tokens=4)
    assert built.metrics["prompts_dropped_zero_variance"] == 1


def test_the_std_may_be_taken_before_the_filter():
    kept = group(0, [sample(0, 2), sample(1, 2)], [True, False])
    dropped = group(1, [sample(0, 2, group=1), sample(1, 2, group=1)], [True, True])
    after, before = (
        floats(build([kept, dropped], advantage_std_over=over).batch.advantages).max()
        for over in ("trained", "all")
    )
    # centered 1, -1 (and 0, 0): std 1 after the filter, sqrt(1/2) before it
    assert after == pytest.approx(1.0, abs=1e-5)
    assert before == pytest.approx(np.sqrt(2), abs=1e-5)


def test_the_constant_length_mean_ignores_how_long_completions_are():
    g = group(0, [sample(0, 3), sample(1, 2)], [True, False])
    built = build([g], aggregation="constant", constant_length_tokens=50)
    weights = floats(built.batch.loss_weights)
    assert weights[weights > 0] == pytest.approx([1 / 100] * 5)


def several_turns(index, *kinds, group=0, version=3):
    """Return a completion whose segments have two tokens each."""
    parts = [Segment(kind, 2 * i, 2 * i + 2) for i, kind in enumerate(kinds)]
    whole = sample(index, 2 * len(kinds), group=group)
    values = [-0.5 if kind == "sampled" else 0.0 for kind in kinds for _ in range(2)]
    return replace(whole, segments=parts, logprobs=float_bytes(values))


def test_given_tokens_have_no_weight_and_count_in_no_mean():
    turns = several_turns(0, "sampled", "given", "sampled")
    batch = build([group(0, [turns, sample(1, 4)], [True, False])]).batch
    (first, *_), weights = ints(batch.prompt_lengths), floats(batch.loss_weights)
    own = weights[first : first + 6]
    assert own.tolist() == pytest.approx([1 / 8] * 2 + [0] * 2 + [1 / 8] * 2)
    assert weights.sum() == pytest.approx(1)
    assert ints(batch.versions)[first : first + 6].tolist() == [3, 3, -1, -1, 3, 3]


def test_turns_are_counted_over_completions_that_are_not_single_turns():
    tools = several_turns(0, "prompt", "sampled", "forced", "sampled", "given", "sampled")
    alone = several_turns(1, "prompt", "sampled")
    metrics = build([group(0, [tools, alone, sample(2, 4)], [True, False, False])]).metrics
    assert metrics["turns_mean"] == 1.5
    assert metrics["several_turns_fraction"] == 0.5
    assert metrics["given_tokens_mean"] == 1
    single = build([group(0, [sample(0, 4, forced=(1, 2)), sample(1, 4)], [True, False])]).metrics
    assert not {"turns_mean", "several_turns_fraction", "given_tokens_mean"} & set(single)


def test_a_prompt_of_its_own_begins_a_sequence():
    # [prompt A][turn] and, after a change of the history, [prompt B][turn given turn]
    split = several_turns(0, "prompt", "sampled", "prompt", "sampled", "given", "sampled")
    built = build([group(0, [split, sample(1, 2)], [True, False])])
    batch, ids = built.batch, list(range(10, 22))
    bounds = ints(batch.bounds).tolist()
    rows = [ints(batch.token_ids)[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    assert rows[:2] == [ids[:4], ids[4:12]]
    assert ints(batch.prompt_lengths).tolist()[:2] == [2, 2]
    assert ints(batch.completion_indices).tolist() == [0, 0, 1]
    weights = floats(batch.loss_weights)
    assert (weights[:12] > 0).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert weights.sum() == pytest.approx(1) and built.metrics["tokens"] == 8


def test_turns_after_the_questions_prompt_and_after_a_prompt_of_their_own():
    split = several_turns(0, "sampled", "prompt", "sampled")
    batch = build([group(0, [split, sample(1, 2)], [True, False])]).batch
    first, second, _ = ints(batch.prompt_lengths).tolist()
    rows = ints(batch.bounds).tolist()
    assert second == 2 and rows[1] - rows[0] == first + 2 and rows[2] - rows[1] == 4
