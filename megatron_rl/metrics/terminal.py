"""A run on the terminal: a line of progress every few seconds, samples, and tables.

All processes of a run write to the same terminal, so progress is appended and never redrawn. Text
of a model is shown, never obeyed (`visible`).
"""

import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_rl.metrics.metrics_file import Row

RATE_WINDOW_STEPS = ALARM_STEPS = 20
SHOWN = {  # metric -> its text in a line of progress
    "reward_mean": "reward {:+.3f}",
    "lag_mean": "lag {:.1f}",
    "lag_max": "max lag {:.0f}",
    "trainer_wait_fraction": "trainer waits {:.0%}",
    "generator_wait_fraction": "generator waits {:.0%}",
    "generator_tokens_per_second": "{:,.0f} tokens/s",
}
UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
SAMPLE_CHARACTERS = {"verdict_reason": 200, "prompt": 200, "completion": 600}


def visible(text: str) -> str:
    """Return a text with its controls and marks of direction as their code: `⟨U+001B⟩`."""
    return UNSEEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


def shortened(text: str, most: int) -> str:
    """Return a `visible` text; of a longer one than `most` characters, its beginning and end."""
    if len(text) > most:
        head = most // 3
        text = f"{text[:head]} … {len(text) - most:,} characters … {text[head - most :]}"
    return visible(text)


class ProgressLog:
    """Prints step, rate, remaining time, last reward and pass rate, lag and waiting shares.

    A resumed run starts at `first_step`. Evaluations and the end do not wait for the interval. An
    alarm that lasts is printed every `ALARM_STEPS` steps.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        *,
        interval_seconds: float = 10.0,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream or sys.stdout
        self._total, self._done, self._interval = total_steps, first_step, interval_seconds
        # (time, updates made) of the last updates: a slow start is not part of the rate.
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW_STEPS + 1)
        self._last: Row = {}
        self._alarmed: dict[str, int] = {}  # alarm -> step in which it was printed
        self._note, self._printed = "", float("-inf")

    def note(self, text: str) -> None:
        """Print an activity apart from the steps, once until the next step."""
        if text != self._note:
            self._note = text
            self._print(text)

    def update(self, row: Row) -> None:
        """Take a row of metrics.jsonl (a step or an evaluation) and print a line if it is due."""
        now = time.monotonic()
        due = now - self._printed >= self._interval
        self._show_alarms(row)
        if row["kind"] == "event":
            return
        if row["kind"] == "step":
            self._last |= row
            self._done = max(self._done, int(row["step"]) + 1)
            self._marks.append((now, self._done))
            self._note = ""
            due |= self._done >= self._total
        elif row["kind"] == "sets":
            rates = (f"{name} {part['pass_rate']:.3f}" for name, part in row["sets"].items())
            self.note(f"pass rate at step {row['step']}: {', '.join(rates)}")
        else:
            self._last["pass_rate"] = _pass_rate(row)
            due = True
        if due:
            self._printed = now
            self._print(", ".join(self._parts()))

    def samples(self, rows: Sequence[Row]) -> None:
        """Print completions (rows of rollout files), two shortened lines below each verdict."""
        lines = list[str]()
        for row in rows:
            texts = [shortened(row[name], most) for name, most in SAMPLE_CHARACTERS.items()]
            value = "no reward" if row["reward"] is None else f"reward {row['reward']:+.3g}"
            head = f"sample of step {row['step']} ({row['task']}): {row['verdict']}, {value}"
            lines += [f"{head}: {texts[0]}", f"  prompt: {texts[1]}", f"  completion: {texts[2]}"]
        if len(rows) == 1:
            other = "wrong" if rows[0]["verdict"] == "correct" else "right"
            lines.append(f"  no completion of this step is {other}")
        self._print("\n".join(line.replace("\n", "⏎") for line in lines))

    def _print(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        text = visible(text).encode(encoding, "backslashreplace").decode(encoding)
        print(text, file=self._stream, flush=True)

    def _show_alarms(self, row: Row) -> None:
        for name, text in row.get("alarms", {}).items():
            if row["step"] - self._alarmed.get(name, -ALARM_STEPS) >= ALARM_STEPS:
                self._alarmed[name] = row["step"]
                self._print(f"ALARM {name}: {text}")

    def _parts(self) -> list[str]:
        parts = [f"step {self._done}/{self._total}"]
        if len(self._marks) > 1:
            (start, first), (end, last) = self._marks[0], self._marks[-1]
            if last > first and end > start:
                seconds = (end - start) / (last - first)
                parts.append(f"{seconds:.3g} s/step")
                if left := self._total - self._done:
                    parts.append(f"{timedelta(seconds=round(left * seconds))} left")
        if rate := self._last.get("pass_rate"):
            parts.append(rate)
        shown = [(text, self._last.get(name)) for name, text in SHOWN.items()]
        return parts + [text.format(x) for text, x in shown if x is not None]


def _pass_rate(row: Row) -> str:
    stderr = row.get("pass_rate_stderr")
    text = f"pass rate {row['pass_rate']:.3f}" + (f" ±{stderr:.3f}" if stderr else "")
    tasks = (row.get("tasks") or {}).items()
    each = ", ".join(f"{task} {part['pass_rate']:.3f}" for task, part in tasks)
    return text + (f" ({each})" if each else "")


def print_table(
    title: str, lines: Iterable[tuple[str, str]], console: Console | None = None
) -> None:
    """Print (name, text) lines as a table."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines:
        # No markup: units and intervals contain brackets.
        table.add_row(Text(visible(name)), Text(visible(text)))
    (console or Console()).print(table)
