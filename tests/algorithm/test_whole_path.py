"""From the generator's message to the gradient, against plain autograd with masks made by hand.

Pad equal to eos inside a completion, no eos at all, interrupted and truncated completions, several
turns: what is trained follows from lengths and the message's own fields, never from token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl import messages as m
from megatron_rl.config import Algorithm
from megatron_rl.orchestrator.batching import build_batch
from megatron_rl.orchestrator.groups import Group
from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.rollouts.interruption import Completion, Interruption, SampledTokens
from megatron_rl.rollouts.rollout import Rollout
from tests.sums import sum_error
from tests.trainer.cases import gradients, run_config, world_of_one, write_model

PAD, EOS, END = 0, 2, 4
PHRASE = [8, 9, END]
PROMPT = [1, 6, 7]
LOGPROB = -3.2
"""What the made-up engine says of every token that it sampled."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "hf", "tiny_dense")


@pytest.fixture(scope="module")
def world(directory: Path) -> Iterator[None]:
    with world_of_one(run_config(directory)):
        yield


def generated(tokens: list[int], thinking: int, answer: int, phrase: list[int]) -> Completion:
    """Build the completion by the generator's rule, from an engine that samples these tokens."""
    rule = Interruption(phrase, lambda ids, _: ids.index(END) + 1 if END in ids else -1)
    left, completion = list(tokens), Completion(thinking, answer, rule if phrase else None)
    while wanted := completion.wanted:
        piece, left = left[:wanted], left[wanted:]
        reason = "stop" if piece[-1] == EOS and not left else "length"
        span = m.VersionSpan(0, 0, len(piece))
        completion.add(SampledTokens(piece, [LOGPROB] * len(piece), [span], reason))
    return completion


# name -> (sampled tokens, thinking budget, answer budget, phrase, completion, trained positions)
CASES: dict[str, tuple[list[int], int, int, list[int], list[int], list[int]]] = {
    "plain": ([10, END, 11, EOS], 5, 4, PHRASE, [10, END, 11, EOS], [0, 1, 2, 3]),
    "pad and eos inside": (
        [PAD, 10, PAD, END, PAD, EOS], 5, 4, PHRASE, [PAD, 10, PAD, END, PAD, EOS], list(range(6)),
    ),
    "no eos at all": ([10, 12, END, 13, 14], 5, 1, PHRASE, [10, 12, END, 13], []),
    "interrupted": (
        [10, 12, 14, 11, EOS], 3, 4, PHRASE, [10, 12, 14, *PHRASE, 11, EOS], [0, 1, 2, 6, 7],
    ),
    "interrupted, phrase ends like eos": (
        [10, 12, 14, 11, EOS], 3, 4, [EOS, PAD, END],
        [10, 12, 14, EOS, PAD, END, 11, EOS], [0, 1, 2, 6, 7],
    ),
    "truncated": ([10, END, 11, 12, 13], 5, 2, PHRASE, [10, END, 11, 12], []),
    "truncated without interruption": ([10, 11, 12, 13], 3, 1, [], [10, 11, 12, 13], []),
}  # fmt: skip


def single_turn(completion: Completion) -> Rollout:
    rollout = Rollout()
    rollout.add(completion)
    return rollout


def three_turns() -> tuple[Rollout, list[int]]:
    """Return turns with replies between them, the second interrupted, and the sampled positions."""
    rollout = Rollout()
    rollout.prompt([*PROMPT, 15])
    rollout.add(generated([10, END, 11, EOS], 5, 4, PHRASE))
    rollout.give([EOS, 16, 17])
    rollout.add(generated([10, 12, 14, 11, EOS], 3, 4, PHRASE))
    rollout.give([18])
    rollout.add(generated([19, EOS], 5, 4, PHRASE))
    return rollout, [*range(4), *range(7, 10), 13, 14, 16, 17]


def sample(index: int, rollout: Rollout) -> m.Sample:
    """Encode and decode the generator's message."""
    message = m.Sample(
        group=0,
        index=index,
        prompt_id=0,
        evaluation=-1,
        token_ids=m.int_bytes(rollout.token_ids),
        logprobs=m.float_bytes(rollout.logprobs),
        segments=rollout.segments,
        spans=rollout.spans,
        finish_reason=rollout.finish_reason,
    )
    decoded = m.decode(m.encode(message))
    assert isinstance(decoded, m.Sample)
    return decoded


@pytest.mark.parametrize("truncated", ["drop", "train"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_trained_follows_from_lengths(
    world: None, directory: Path, name: str, truncated: str
) -> None:
    tokens, thinking, answer, phrase, whole, positions = CASES[name]
    completion = generated(tokens, thinking, answer, phrase)
    assert completion.token_ids == whole
    if truncated == "train" and completion.finish_reason == "length":
        positions = list(range(len(whole)))
    counts = truncated == "train" or completion.finish_reason != "length"
    trained = (PROMPT, whole, positions) if counts else None
    check_gradient(directory, single_turn(completion), trained, truncated)


def test_of_a_rollout_of_turns_the_sampled_tokens_alone_are_trained(
    world: None, directory: Path
) -> None:
    rollout, positions = three_turns()
    assert rollout.turns == 3
    prompt, *rest = (rollout.token_ids[s.start : s.end] for s in rollout.segments)
    whole = [i for ids in rest for i in ids]
    assert [whole[t] for t in positions] == [10, END, 11, EOS, 10, 12, 14, 11, EOS, 19, EOS]
    check_gradient(directory, rollout, (prompt, whole, positions), "drop")


def check_gradient(
    directory: Path,
    rollout: Rollout,
    case: tuple[list[int], list[int], list[int]] | None,
    truncated: str,
) -> None:
    """Compare loss and gradients of a group's step with those by autograd.

    Args:
        directory: the model's.
        rollout: a wrong one, next to a right one of four tokens and a wrong one of two.
        case: its prompt, what follows, and the positions in it that are trained; None: it does
            not count.
        truncated: `algorithm.truncated`.
    """
    from transformers import AutoModelForCausalLM

    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.step import Trainer

    others = [single_turn(generated(t, 5, 4, PHRASE)) for t in ([20, END, 21, EOS], [22, EOS])]
    group = Group(0, 0, 3, "generator-0")
    for i, r in enumerate((rollout, *others)):
        group.samples[i] = sample(i, r)
        group.verdicts[i] = Verdict(Outcome.CORRECT if i == 1 else Outcome.WRONG, "")
    algorithm = Algorithm(truncated=truncated, advantage_normalization="none")  # type: ignore[arg-type]
    batch = build_batch(0, [group], {0: PROMPT}, algorithm).batch
    batch = m.decode(m.encode(batch))

    config = run_config(
        directory, algorithm__truncated=truncated, algorithm__advantage_normalization="none"
    )
    policy = Policy(config, directory)
    found: dict[str, Any] = {}
    policy.apply = lambda rate: (found.update(gradients(policy)), 0.0)[1]  # type: ignore[method-assign]
    done = Trainer(config, policy).train_step(batch, 0)

    # By hand: rewards -1 (the case, if it counts), 1, -1, centered; one weight for all tokens.
    trained = [(*case, -1.0)] if case else []
    trained += [
        (PROMPT, [20, END, 21, EOS], [0, 1, 2, 3], 1.0),
        (PROMPT, [22, EOS], [0, 1], -1.0),
    ]
    mean = sum(r for *_, r in trained) / len(trained)
    total = sum(len(p) for *_, p, _ in trained)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    terms = []
    for prompt, ids, chosen, reward in trained:
        rows = torch.log_softmax(model(torch.tensor([[*prompt, *ids]])).logits[0], -1)
        for t in chosen:
            logp = rows[len(prompt) + t - 1, ids[t]]
            ratio = (logp.detach() - LOGPROB).exp().clamp(max=5.0)
            terms.append(-ratio * (reward - mean) * logp / total)
    loss = torch.stack(terms).sum()
    loss.backward()
    assert done.metrics["tokens_trained"] == total
    # Both sides are fp32: log-probs differ by some 1e-6, and terms in proportion.
    size = torch.stack(terms).detach().abs().sum()
    assert sum_error(torch.tensor(done.metrics["loss"]), loss.detach(), size) < 1e-5
    assert len(found) > 10
    for key, parameter in model.named_parameters():
        want = parameter.grad
        if "embed_tokens" in key:  # transformers keeps the pad token's row out of its gradient
            want, found[key] = want[1:], found[key][1:]
        scale = float(want.abs().max())
        torch.testing.assert_close(found[key], want, atol=1e-5 * scale + 1e-9, rtol=1e-4)
