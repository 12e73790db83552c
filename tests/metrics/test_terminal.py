"""Progress lines: text only, at intervals, with rate and remaining time."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megatron_rl.metrics.terminal import UNSEEN, ProgressLog, print_table, shortened, visible

ROW = {
    "kind": "step",
    "reward_mean": 0.125,
    "lag_mean": 3.2,
    "lag_max": 5,
    "trainer_wait_fraction": 0.3,
    "generator_wait_fraction": 0.01,
    "generator_tokens_per_second": 1834.0,
}


def test_a_line_is_printed_at_intervals_and_for_evaluations_and_the_end() -> None:
    stream = io.StringIO()
    progress = ProgressLog(40, interval_seconds=1e6, stream=stream)
    for step in range(40):
        progress.update(ROW | {"step": step})
        if step == 20:
            rates = {"pass_rate": 0.25, "pass_rate_stderr": 0.012}
            tasks = {"sums": {"pass_rate": 0.5}, "lists": {"pass_rate": 0.0}}
            progress.update({"kind": "eval", "step": 20, **rates, "tasks": tasks})
    lines = stream.getvalue().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["step 1/40", "step 21/40", "step 40/40"]
    assert "pass rate 0.250 ±0.012 (sums 0.500, lists 0.000), reward +0.125" in lines[1]
    assert "lag 3.2, max lag 5, trainer waits 30%, generator waits 1%, 1,834 tokens/s" in lines[1]
    assert "\x1b" not in stream.getvalue()


def test_a_note_is_printed_once_between_steps() -> None:
    stream = io.StringIO()
    progress = ProgressLog(40, interval_seconds=1e6, stream=stream)
    for _ in range(2):
        progress.note("evaluating")
        progress.note("evaluating")
        progress.update({"kind": "step", "step": 0})
    assert stream.getvalue().splitlines() == ["evaluating", "step 1/40", "evaluating"]


def test_rate_and_remaining_time_follow_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("megatron_rl.metrics.terminal.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = ProgressLog(100, first_step=50, interval_seconds=0, stream=stream)
    now[0] += 300  # a slow start does not count
    for step in range(50, 60):
        progress.update({"kind": "step", "step": step})
        now[0] += 2.0
    # 9 steps in 18 s between the first and the last update; 40 steps are left.
    assert stream.getvalue().splitlines()[-1] == "step 60/100, 2 s/step, 0:01:20 left"


HOSTILE = "\x1b]0;taken\x07\x1b[2J\r\u202eright to left\u202c\x9b1m\u2028\ud800"
SAMPLE = {
    "step": 100, "task": "sums", "verdict": "correct", "verdict_reason": "21 is 21", "reward": 1.0,
    "prompt": "<bos>7+8+6=?<think>", "completion": "15;\n21</think>21<eos>",
}  # fmt: skip


def shown(*rows: dict[str, object], encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    ProgressLog(500, stream=stream).samples(rows)
    return stream.buffer.getvalue().decode(encoding)


def test_a_sample_has_its_verdict_its_prompt_and_its_completion() -> None:
    wrong = {"verdict": "no_answer", "verdict_reason": "no end", "reward": None, "completion": "1"}
    assert shown(SAMPLE, SAMPLE | wrong).splitlines() == [
        "sample of step 100 (sums): correct, reward +1: 21 is 21",
        "  prompt: <bos>7+8+6=?<think>",
        "  completion: 15;⏎21</think>21<eos>",
        "sample of step 100 (sums): no_answer, no reward: no end",
        "  prompt: <bos>7+8+6=?<think>",
        "  completion: 1",
    ]


def test_a_step_without_a_wrong_or_a_right_completion_says_so() -> None:
    assert shown(SAMPLE).splitlines()[3:] == ["  no completion of this step is wrong"]
    wrong = SAMPLE | {"verdict": "wrong"}
    assert shown(wrong).splitlines()[3:] == ["  no completion of this step is right"]


def test_text_of_a_model_cannot_act_on_the_terminal() -> None:
    texts = dict.fromkeys(("task", "prompt", "completion", "verdict_reason"), HOSTILE + "\nA")
    lines = shown(SAMPLE | texts).split("\n")
    assert [line[:12] for line in lines[:-1]] == [
        "sample of st", "  prompt: ⟨U", "  completion", "  no complet",
    ]  # fmt: skip
    assert not UNSEEN.search("".join(lines))
    assert lines[1] == (
        "  prompt: ⟨U+001B⟩]0;taken⟨U+0007⟩⟨U+001B⟩[2J⟨U+000D⟩⟨U+202E⟩right to left⟨U+202C⟩"
        "⟨U+009B⟩1m⟨U+2028⟩⟨U+D800⟩⏎A"
    )
    # Reasons, which quote completions, are in alarms, notes and the report too.
    stream = io.StringIO()
    progress = ProgressLog(40, stream=stream)
    progress.update({"kind": "event", "step": 1, "alarms": {"no_answer": HOSTILE}})
    progress.note(HOSTILE)
    print_table("run", [("alarm", HOSTILE)], Console(file=stream, width=300))
    assert not UNSEEN.search(stream.getvalue())
    assert stream.getvalue().count("⟨U+001B⟩[2J") == 3


def test_a_sample_is_short_however_long_its_texts_are() -> None:
    texts = dict.fromkeys(("prompt", "completion", "verdict_reason"), "a" + "\x1b" * 10**6 + "z")
    text = shown(SAMPLE | texts)
    assert len(text) < 9 * (200 + 200 + 600) + 300
    assert all(line.endswith("z") for line in text.splitlines()[:3])
    assert text.count("…") == 6
    assert shortened("abcdefghij", 6) == "ab … 4 characters … ghij"
    assert shortened("abcdef", 6) == "abcdef"
    assert visible(visible(HOSTILE)) == visible(HOSTILE)


def test_a_terminal_without_the_characters_shows_their_codes() -> None:
    text = shown(SAMPLE | {"completion": "答え\x1b"}, encoding="ascii")
    assert text.splitlines()[2] == "  completion: \\u7b54\\u3048\\u27e8U+001B\\u27e9"
