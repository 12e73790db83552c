"""The progress view keeps to the terminal's last lines, and gives the terminal back."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from megatron_rl.metrics.terminal import (
    HEIGHT,
    TerminalView,
    _duration,
    _rate,
    resolve_mode,
    restore_terminal,
)

ROWS, COLUMNS = 12, 100
ROW = {
    "kind": "step",
    "reward_mean": 0.125,
    "lag_mean": 3.2,
    "lag_max": 5,
    "trainer_wait_fraction": 0.3,
    "generator_wait_fraction": 0.01,
    "generator_tokens_per_second": 1834.0,
}


class Screen:
    """As much of a terminal as the view uses: scroll region, saved cursor, moves, clear line."""

    def __init__(self) -> None:
        self.lines = [""] * ROWS
        self.scrolled: list[str] = []
        self.row, self.column, self.bottom = 0, 0, ROWS - 1
        self.saved = (0, 0)

    def feed(self, text: str) -> None:
        for token in re.findall(r"\x1b\[[\d;]*[A-Za-z]|\x1b[78]|.|\n|\r", text):
            if token == "\x1b7":
                self.saved = (self.row, self.column)
            elif token == "\x1b8":
                self.row, self.column = self.saved
            elif token.startswith("\x1b["):
                self.control(token[-1], [int(n) for n in token[2:-1].split(";") if n])
            elif token == "\r":
                self.column = 0
            elif token == "\n":
                self.newline()
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + token + line[self.column + 1 :]
                self.column += 1

    def newline(self) -> None:
        if self.row == self.bottom:
            self.scrolled.append(self.lines.pop(0))
            self.lines.insert(self.bottom, "")
        else:
            self.row = min(self.row + 1, ROWS - 1)

    def control(self, letter: str, numbers: list[int]) -> None:
        if letter == "H":
            self.row, self.column = numbers[0] - 1, numbers[1] - 1
        elif letter == "A":
            self.row = max(self.row - numbers[0], 0)
        elif letter == "K":
            self.lines[self.row] = ""
        elif letter == "r":
            self.bottom = numbers[1] - 1 if numbers else ROWS - 1
            self.row = self.column = 0
        else:
            assert letter == "m", f"the view sent \\x1b[{letter}"

    @property
    def text(self) -> list[str]:
        return [line.rstrip() for line in self.scrolled + self.lines]


class Terminal:
    """A pseudo terminal: what is written to `stream` arrives on `screen`."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.stream: TextIO = os.fdopen(slave, "w")
        self.screen = Screen()

    def other_process_says(self, line: str) -> None:
        os.write(self.stream.fileno(), (line + "\n").encode())

    def show(self) -> Screen:
        while select.select([self.master], [], [], 0.05)[0]:
            self.screen.feed(os.read(self.master, 65536).decode())
        return self.screen


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    found = Terminal()
    yield found
    found.stream.close()
    os.close(found.master)


def test_other_processes_lines_scroll_above_the_view_unharmed(terminal: Terminal) -> None:
    said = [f"(rank 1) line {i} x" + "x" * i for i in range(30)]
    terminal.other_process_says("before")
    with TerminalView(40, stream=terminal.stream) as view:
        for i, line in enumerate(said):
            terminal.other_process_says(line)
            view.update(ROW | {"step": i})
            view.tick()
            terminal.show()
        view.note("saving")
        screen = terminal.show()
        status = screen.lines[-HEIGHT:]
        assert "saving" in status[0]
        assert "step 30/40" in status[1]
        assert "reward +0.125" in status[2]
        above = [line for line in screen.text[:-HEIGHT] if line]
        assert above == ["before", *said]


def test_the_view_ends_with_its_last_state_and_the_whole_terminal(terminal: Terminal) -> None:
    view = TerminalView(40, stream=terminal.stream)
    terminal.other_process_says("hello")
    view.update(ROW | {"step": 9})
    view.update({"kind": "eval", "step": 9, "pass_rate": 0.5, "pass_rate_stderr": 0.012})
    view.close()
    view.close()
    view.update(ROW | {"step": 10})
    terminal.other_process_says("after")
    screen = terminal.show()
    assert screen.bottom == ROWS - 1
    text = [line for line in screen.text if line]
    assert text[0] == "hello"
    assert "step 10/40" in text[1]
    assert "pass rate 0.500 ±0.012" in " ".join(text)
    assert text[-1] == "after"
    assert not any("megatron_rl ·" in line for line in text)


def test_a_process_that_ends_by_an_exception_gives_the_terminal_back(terminal: Terminal) -> None:
    with (
        pytest.raises(RuntimeError, match="boom"),
        TerminalView(40, stream=terminal.stream) as view,
    ):
        view.update(ROW | {"step": 0})
        raise RuntimeError("boom")
    assert terminal.show().bottom == ROWS - 1


def test_the_terminal_of_a_killed_process_can_be_given_back(terminal: Terminal) -> None:
    view = TerminalView(40, stream=terminal.stream)
    assert terminal.show().bottom == ROWS - 1 - HEIGHT
    restore_terminal(terminal.stream)
    assert terminal.show().bottom == ROWS - 1
    view.close()


def test_a_terminal_that_is_too_small_is_left_alone(terminal: Terminal) -> None:
    size = struct.pack("HHHH", HEIGHT, COLUMNS, 0, 0)
    fcntl.ioctl(terminal.stream.fileno(), termios.TIOCSWINSZ, size)
    with TerminalView(40, stream=terminal.stream) as view:
        view.update(ROW | {"step": 0})
        assert not any(terminal.show().text)


def test_auto_is_rich_on_a_terminal_and_plain_elsewhere(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_mode("auto", terminal.stream) == "rich"
    assert resolve_mode("auto", io.StringIO()) == "plain"
    assert resolve_mode("rich", io.StringIO()) == "plain"
    assert resolve_mode("off", terminal.stream) == "off"
    monkeypatch.setenv("TERM", "dumb")
    assert resolve_mode("auto", terminal.stream) == "plain"


def test_plain_prints_a_line_now_and_then_and_always_evaluations_and_the_end() -> None:
    stream = io.StringIO()
    with TerminalView(40, "plain", plain_seconds=1e6, stream=stream) as view:
        for step in range(40):
            view.update(ROW | {"step": step})
            if step == 20:
                view.update({"kind": "eval", "step": 20, "pass_rate": 0.25})
    lines = stream.getvalue().splitlines()
    assert [re.match(r"step (\d+)/40", line)[1] for line in lines] == ["1", "21", "40"]  # type: ignore[index]
    assert "pass rate 0.250" in lines[1]
    assert "lag 3.2 (max 5)" in lines[1]
    assert "trainer waits 30%, generator waits 1%" in lines[1]
    assert "\x1b" not in stream.getvalue()


def test_off_prints_nothing() -> None:
    stream = io.StringIO()
    with TerminalView(40, "off", stream=stream) as view:
        view.note("starting")
        view.update(ROW | {"step": 0})
    assert stream.getvalue() == ""


def test_rate_and_remaining_time_follow_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("megatron_rl.metrics.terminal.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    view = TerminalView(100, "plain", plain_seconds=0, stream=stream, first_step=50)
    now[0] += 300  # a slow start does not count
    for step in range(50, 60):
        view.update({"kind": "step", "step": step})
        now[0] += 2.0
    # 9 steps in 18 s between the first and the last update; 40 steps are left.
    assert "step 60/100, 2.0 s/step, 1m 20s left" in stream.getvalue().splitlines()[-1]


def test_durations_and_rates_are_short() -> None:
    assert [_duration(s) for s in (4.4, 80, 3725)] == ["4s", "1m 20s", "1h 02m"]
    assert [_rate(r) for r in (0.1, 2.5)] == ["10.0 s/step", "2.5 steps/s"]
