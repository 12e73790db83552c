import pytest

from megatron_rl.rewards import Outcome, verify_exact


@pytest.mark.parametrize(
    ("completion", "outcome"),
    [
        ("5*8=40</think>\\boxed{52}<eos>", Outcome.CORRECT),
        ("</think>\\boxed{52}<eos>", Outcome.CORRECT),
        ("5*8=40</think>\\boxed{53}<eos>", Outcome.WRONG),
        ("</think>\\boxed{052}<eos>", Outcome.WRONG),
        ("</think>\\boxed{}<eos>", Outcome.WRONG),
        ("\\boxed{52}<eos>", Outcome.NO_ANSWER),  # thinking never ended
        ("</think>52<eos>", Outcome.NO_ANSWER),
        ("</think>\\boxed{52}", Outcome.NO_ANSWER),  # cut before the end
        ("</think>\\boxed{52}1<eos>", Outcome.NO_ANSWER),
        ("</think>\\boxed{52<eos>", Outcome.NO_ANSWER),
        ("</think></think>\\boxed{52}<eos>", Outcome.NO_ANSWER),
        ("\\boxed{52}</think>\\boxed{1}<eos>", Outcome.WRONG),  # only what follows thinking counts
    ],
)
def test_only_the_gold_answer_boxed_right_after_thinking_passes(completion, outcome):
    verdict = verify_exact(completion, "52")
    assert verdict.outcome is outcome
    assert verdict.passed == (outcome is Outcome.CORRECT)
    assert verdict.reason
