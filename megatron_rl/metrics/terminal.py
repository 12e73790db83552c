"""Progress of a run on the terminal: a rich view on the last lines, or one plain line now and then.

Other processes of the run write to the same terminal at any moment, so the view does not redraw
in the text's flow, as a live display does: it reserves the terminal's last lines by a scroll
region, and all other text scrolls above them. Each repaint is one write that puts the cursor back.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import time
from collections import deque
from typing import Any, Literal, Self, TextIO

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

HEIGHT = 3
REPAINT_SECONDS = 0.1
RATE_WINDOW_STEPS = 20

Row = dict[str, Any]


def resolve_mode(
    mode: Literal["auto", "rich", "plain", "off"], stream: TextIO
) -> Literal["rich", "plain", "off"]:
    """`auto` and `rich` are rich on a terminal that can move its cursor, and plain elsewhere."""
    if mode in ("plain", "off"):
        return mode
    capable = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return "rich" if capable else "plain"


class TerminalView:
    """Progress, rate, remaining time, last reward and pass rate, lag and waiting shares.

    Args:
        total_steps: optimizer steps of the whole run.
        mode: `auto`, `rich`, `plain` or `off`.
        first_step: updates already made (a resumed run).
        plain_seconds: least time between two lines of the plain view [s].
        stream: where to write; stdout by default.

    `update` never waits, so that an asyncio process can call it. `close` gives the terminal back
    and may be called twice.
    """

    def __init__(
        self,
        total_steps: int,
        mode: Literal["auto", "rich", "plain", "off"] = "auto",
        *,
        first_step: int = 0,
        plain_seconds: float = 10.0,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream or sys.stdout
        self.mode = resolve_mode(mode, self._stream)
        self._total = total_steps
        self._plain_seconds = plain_seconds
        self._done = first_step
        # (when, updates made) of the last updates: a slow start does not count into the rate.
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW_STEPS + 1)
        self._last: Row = {}
        self._note = "starting"
        self._shown = float("-inf")
        self._size: tuple[int, int] | None = None
        self._closed = False
        if self.mode == "rich":
            # A process that ends by an exception must not leave the terminal with a region.
            atexit.register(self.close)
            self._paint(force=True)

    def note(self, text: str) -> None:
        """Say what goes on beside the steps (`supervised stage`, `evaluating at step 40`)."""
        if text == self._note or self._closed:
            return
        self._note = text
        if self.mode == "plain":
            self._say(text)
        self._paint(force=True)

    def update(self, row: Row) -> None:
        """Take a row of metrics.jsonl (kind `step` or `eval`) and show it when it is time."""
        if self._closed:
            return
        kind = row.get("kind", "step")
        if kind == "step":
            self._last |= row
            self._done = max(self._done, int(row["step"]) + 1)
            self._note = "training"
            self._marks.append((time.monotonic(), self._done))
        elif kind == "eval":
            self._last |= {k: row[k] for k in ("pass_rate", "pass_rate_stderr") if k in row}
            self._last["task_rates"] = {
                task: measured["pass_rate"] for task, measured in (row.get("tasks") or {}).items()
            }
        if self.mode == "plain":
            now = time.monotonic()
            finished = kind == "step" and self._done >= self._total
            if kind == "eval" or finished or now - self._shown >= self._plain_seconds:
                self._shown = now
                self._say(self._progress() + " | " + self._state())
        self._paint()

    def tick(self) -> None:
        """Repaint: called now and then, it follows the terminal's size and the clock."""
        self._paint()

    def close(self) -> None:
        """Give the terminal back and leave the last state as a line of text."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self.mode == "rich" and self._size is not None:
            rows, _ = self._size
            clear = "".join(f"\x1b[{rows - i};1H\x1b[2K" for i in range(HEIGHT))
            self._emit(f"\x1b7\x1b[r{clear}\x1b8")
            self._say(self._progress() + " | " + self._state())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- what is said

    def _steps_per_second(self) -> float | None:
        if len(self._marks) < 2:
            return None
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - start) if last > first and end > start else None

    def _progress(self) -> str:
        text = f"step {self._done}/{self._total}"
        rate = self._steps_per_second()
        if rate:
            text += f", {_rate(rate)}"
            if self._done < self._total:
                text += f", {_duration((self._total - self._done) / rate)} left"
        return text

    def _state(self) -> str:
        m = self._last
        parts = []
        if (pass_rate := m.get("pass_rate")) is not None:
            stderr = m.get("pass_rate_stderr")
            parts.append(f"pass rate {pass_rate:.3f}" + (f" ±{stderr:.3f}" if stderr else ""))
            if rates := m.get("task_rates"):
                each = ", ".join(f"{task} {rate:.3f}" for task, rate in rates.items())
                parts[-1] += f" ({each})"
        for name, label, form in (
            ("reward_mean", "reward", "{:+.3f}"),
            ("lag_mean", "lag", "{:.1f}"),
            ("trainer_wait_fraction", "trainer waits", "{:.0%}"),
            ("generator_wait_fraction", "generator waits", "{:.0%}"),
            ("generator_tokens_per_second", "tokens/s", "{:,.0f}"),
        ):
            value = m.get(name)
            if value is None:
                continue
            text = f"{label} {form.format(value)}"
            if name == "lag_mean" and m.get("lag_max") is not None:
                text += f" (max {m['lag_max']:.0f})"
            parts.append(text)
        return ", ".join(parts) or self._note

    # ---------------------------------------------------------------- how it is shown

    def _say(self, text: str) -> None:
        self._emit(text + "\n")

    def _emit(self, text: str) -> None:
        # One write: other processes' text cannot come between a cursor move and its return.
        self._stream.write(text)
        self._stream.flush()

    def _paint(self, *, force: bool = False) -> None:
        now = time.monotonic()
        due = force or now - self._shown >= REPAINT_SECONDS or self._done >= self._total
        if self.mode != "rich" or self._closed or not due:
            return
        self._shown = now
        size = os.get_terminal_size(self._stream.fileno())
        rows, columns = size.lines, size.columns
        if rows < HEIGHT + 2 or columns < 20:
            return
        text = ""
        if (rows, columns) != self._size:
            text += self._reserve(rows, first=self._size is None)
            self._size = (rows, columns)
        text += "\x1b7"
        for i, line in enumerate(self._render(columns)):
            text += f"\x1b[{rows - HEIGHT + 1 + i};1H\x1b[2K{line}"
        self._emit(text + "\x1b8")

    def _reserve(self, rows: int, *, first: bool) -> str:
        """Make room below the cursor, and keep all other text out of the last lines."""
        region = f"\x1b7\x1b[1;{rows - HEIGHT}r\x1b8"
        if first:
            return "\n" * HEIGHT + f"\x1b[{HEIGHT}A" + region
        return region + f"\x1b[{rows - HEIGHT};1H"

    def _render(self, columns: int) -> list[str]:
        buffer = io.StringIO()
        console = Console(
            file=buffer, force_terminal=True, width=columns, height=HEIGHT, legacy_windows=False
        )
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_row(self._progress(), ProgressBar(total=self._total, completed=self._done))
        state = Text(self._state(), no_wrap=True, overflow="ellipsis", style="bold")
        rule = Text(f"megatron_rl · {self._note}", no_wrap=True, overflow="ellipsis", style="dim")
        console.print(Group(rule, bar, state))
        return buffer.getvalue().split("\n")[:HEIGHT]


def restore_terminal(stream: TextIO | None = None) -> None:
    """Give the whole terminal back after a process that showed a view was killed."""
    stream = stream or sys.stdout
    if stream.isatty():
        stream.write("\x1b7\x1b[r\x1b8")
        stream.flush()


def _rate(steps_per_second: float) -> str:
    if steps_per_second >= 1:
        return f"{steps_per_second:.1f} steps/s"
    return f"{1 / steps_per_second:.1f} s/step"


def _duration(seconds: float) -> str:
    """Example: `_duration(3725)` is `1h 02m`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
