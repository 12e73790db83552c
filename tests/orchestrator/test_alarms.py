"""A run that cannot learn says why within three steps; a healthy one is silent."""

from __future__ import annotations

import io

import pytest

from megatron_rl.config import RunConfig
from megatron_rl.metrics.metrics_file import Row
from megatron_rl.metrics.terminal import ProgressLog
from megatron_rl.orchestrator import RunError
from megatron_rl.orchestrator.verification import Verification
from megatron_rl.rewards import Outcome, Verdict
from tests.orchestrator.peers import TWO_TASKS, AtOnce, Rows, run, small_config, verify


def boxed(ids: list[int]) -> str:
    """Return a completion in the right form, whose answer no prompt has (they have 0 to 39)."""
    return f"{ids}</think>\\boxed{{{ids[0] + 100}}}<eos>"


def in_vain(config: RunConfig, verification: Verification | AtOnce) -> list[Row]:
    """Run until nothing was learned from four batches in a row; return their rows."""
    rows = Rows()
    with pytest.raises(RunError, match=r"step 0: 4 batches in a row had nothing.*max_empty_batch"):
        run(config, verification=verification, rows=rows)
    assert not rows.steps
    assert [(row["event"], row["step"]) for row in rows.events] == [("empty_batch", 0)] * 4
    assert sum("it is skipped" in note for note in rows.notes) == 4
    return rows.events


def exact(think_end: str = "</think>", **values: float | None) -> list[Row]:
    """Run the exact verifier on `boxed` completions."""
    tree = small_config(steps=4, max_empty_batches=4).model_dump()
    tree["generation"] |= {"think_end": think_end, "interruption_phrase": f"Stop. {think_end}"}
    tree["verifier"] = {"values": values}
    config = RunConfig.model_validate(tree)
    return in_vain(config, Verification(config.verifier, ["exact"], boxed))


def every(outcome: Outcome, reason: str = "", **schedule: int) -> list[Row]:
    config = small_config(steps=4, max_empty_batches=4, **schedule)
    return in_vain(config, AtOnce(lambda *_: Verdict(outcome, reason)))


def alarms(rows: list[Row]) -> dict[str, str]:
    """Return the alarms of the third batch; they last."""
    for row in rows[3:]:
        assert row["alarms"].keys() == rows[2]["alarms"].keys()
    return rows[2]["alarms"]


def test_a_wrong_marker_is_named_within_three_steps_with_what_was_seen() -> None:
    for values, reward in (
        ({"no_answer": -1.0}, "each reward -1"),
        ({"no_answer": None}, "no reward"),
    ):
        (name, text), *others = alarms(exact("</reason>", **values)).items()
        assert (name, others) == ("no_answer", [])
        assert text.startswith(
            f"no prompt has two rewards, nothing is learned: 36 no_answer, {reward}, most"
        )
        assert "most often: thinking did not end." in text
        for key in ("generation.think_end", "verifier.math.boxed", "thinking_budget_tokens"):
            assert key in text, key


def test_a_wrong_verifier_or_task_is_told_by_what_all_rewards_are() -> None:
    cases = {
        "36 wrong, each reward -1, most often: 1": (
            exact(),
            "gold answers are wrong",
        ),
        "36 correct, each reward +1. ": (every(Outcome.CORRECT), "too easy"),
        "36 unparsable, ": (every(Outcome.UNPARSABLE), "cannot read"),
        "36 timed_out, ": (every(Outcome.TIMED_OUT, "slow"), "verifier.cpu_sec"),
    }
    for shown, (outcome, cause) in cases.items():
        (name, text), *others = alarms(outcome).items()
        assert (name, others) == ("no_difference", [])
        assert f"nothing is learned: {shown}" in text
        assert cause in text.partition("Likely cause: ")[2]


def test_a_step_of_enough_completions_is_judged_alone() -> None:
    outcome = every(Outcome.CORRECT, completions_per_prompt=40)
    assert "120 correct" in outcome[0]["alarms"]["no_difference"]


def test_prompts_that_are_all_right_or_all_wrong_are_a_cause_of_their_own() -> None:
    def by_prompt(prompt: object, sample: object) -> Verdict:
        right = sample.prompt_id % 2 == 0  # type: ignore[attr-defined]
        return Verdict(Outcome.CORRECT if right else Outcome.WRONG, "")

    config = small_config(steps=4, max_empty_batches=4)
    text = alarms(in_vain(config, AtOnce(by_prompt)))["no_difference"]
    assert "all right or all wrong" in text and "completions_per_prompt" in text


def test_one_task_without_answers_is_named() -> None:
    def one(prompt: object, sample: object) -> Verdict:
        if prompt.task == "sums":  # type: ignore[attr-defined]
            return Verdict(Outcome.NO_ANSWER, "no box")
        return verify(prompt, sample)  # type: ignore[arg-type]

    (name, text), *others = alarms(
        run(small_config(TWO_TASKS, steps=4), verification=AtOnce(one)).rows.steps
    ).items()
    assert (name, others) == ("no_answer/sums", [])
    assert "task sums" in text and "no box" in text


def test_refilling_in_vain_ends_with_the_same_diagnosis() -> None:
    config = small_config(steps=4)
    config = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"refill": True})}
    )
    verification = AtOnce(lambda *_: Verdict(Outcome.NO_ANSWER, "thinking did not end"))
    with pytest.raises(RunError, match=r"no_answer.*thinking did not end.*generation\.think_end"):
        run(config, verification=verification)


def test_healthy_runs_and_their_evaluations_are_silent() -> None:
    def only_in_training(prompt: object, sample: object) -> Verdict:
        if sample.evaluation >= 0:  # type: ignore[attr-defined]
            return Verdict(Outcome.NO_ANSWER, "a held-out prompt")
        return verify(prompt, sample)  # type: ignore[arg-type]

    outcome = run(small_config(), verification=AtOnce(only_in_training))
    assert len(outcome.rows.evals) == 4
    assert [row["alarms"] for row in outcome.rows.steps if "alarms" in row] == []
    assert sum(row["prompts_differing"] for row in outcome.rows.steps) == sum(
        row["prompts_trained"] for row in outcome.rows.steps
    )


def test_the_terminal_shows_an_alarm_when_it_begins_and_now_and_then() -> None:
    stream = io.StringIO()
    progress = ProgressLog(100, interval_seconds=1e6, stream=stream)
    row = exact("</reason>")[2]
    for step in range(45):
        lasts = step not in range(5) and step != 30  # a short pause does not repeat it
        progress.update(
            {"kind": "step", "step": step, **({"alarms": row["alarms"]} if lasts else {})}
        )
        if step == 5:
            assert stream.getvalue().splitlines()[-1].startswith("ALARM no_answer: no prompt")
    assert stream.getvalue().count("ALARM") == 2  # steps 5 and 25
