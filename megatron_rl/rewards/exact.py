"""Exact verifier: the boxed text after thinking must equal the gold answer."""

from megatron_rl.rewards.base import Outcome, Verdict

BOX = "\\boxed{"


def verify_exact(
    completion: str, answer: str, think_end: str = "</think>", eos: str = "<eos>"
) -> Verdict:
    r"""Check that a completion's text after thinking is `\boxed{answer}` and nothing else.

    The completion has its special tokens: the first `think_end` closes thinking, `eos` must follow
    the box.
    """
    _, ended, tail = completion.partition(think_end)
    if not ended:
        return Verdict(Outcome.NO_ANSWER, "thinking did not end")
    if not tail.startswith(BOX):
        return Verdict(Outcome.NO_ANSWER, f"no {BOX}...}} right after {think_end}")
    inside, closed, rest = tail[len(BOX) :].partition("}")
    if not closed or rest != eos:
        return Verdict(Outcome.NO_ANSWER, "the box is not closed, or text follows it")
    if inside != answer:
        return Verdict(Outcome.WRONG, f"{inside} is not {answer}")
    return Verdict(Outcome.CORRECT, f"{inside} is the answer")
