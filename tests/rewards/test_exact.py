"""The exact verifier."""

from __future__ import annotations

from megatron_rl.rewards import Outcome, verify_exact

OUTCOMES = {
    "5*8=40</think>\\boxed{52}<eos>": Outcome.CORRECT,
    "</think>\\boxed{52}<eos>": Outcome.CORRECT,
    "5*8=40</think>\\boxed{53}<eos>": Outcome.WRONG,
    "</think>\\boxed{052}<eos>": Outcome.WRONG,
    "</think>\\boxed{}<eos>": Outcome.WRONG,
    "\\boxed{52}<eos>": Outcome.NO_ANSWER,  # thinking never ended
    "</think>52<eos>": Outcome.NO_ANSWER,
    "</think>\\boxed{52}": Outcome.NO_ANSWER,  # truncated
    "</think>\\boxed{52}1<eos>": Outcome.NO_ANSWER,
    "</think>\\boxed{52<eos>": Outcome.NO_ANSWER,
    "</think></think>\\boxed{52}<eos>": Outcome.NO_ANSWER,
    "\\boxed{52}</think>\\boxed{1}<eos>": Outcome.WRONG,  # the box must follow thinking
}


def test_only_the_gold_answer_boxed_right_after_thinking_passes() -> None:
    verdicts = {completion: verify_exact(completion, "52") for completion in OUTCOMES}
    assert {completion: v.outcome for completion, v in verdicts.items()} == OUTCOMES
    assert all(v.reason for v in verdicts.values())
    assert [c for c, v in verdicts.items() if v.passed] == list(OUTCOMES)[:2]
