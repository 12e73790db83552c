"""Unified diffs on text: exact context, any line offset, forwards and backwards.

What comes out is compared with a known hash by the caller, so finding a hunk some lines away from
where the diff was made cannot go wrong unseen; context is never matched loosely.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")


class DiffError(ValueError):
    """A text that is no unified diff, or that does not fit the file."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines (with their line ends) that stand in a file before and after the change."""

    before: list[str]
    after: list[str]
    before_line: int
    after_line: int

    def reversed(self) -> Hunk:
        """The same change backwards."""
        return Hunk(self.after, self.before, self.after_line, self.before_line)


def parse(diff: str) -> dict[str, list[Hunk]]:
    """Path of each changed file -> its hunks.

    Raises:
        DiffError: a line that a unified diff of existing text files cannot have.
    """
    files: dict[str, list[Hunk]] = {}
    hunks: list[Hunk] | None = None
    for number, line in enumerate(diff.splitlines(keepends=True), 1):
        if line.startswith("--- "):
            hunks = None
        elif line.startswith("+++ ") and hunks is None:
            hunks = files.setdefault(line[4:].strip().removeprefix("b/"), [])
        elif match := HUNK.match(line):
            if hunks is None:
                raise DiffError(f"line {number}: a hunk before its file")
            hunks.append(Hunk([], [], int(match[1]), int(match[2])))
        elif hunks and line[0] in " -+":
            if line[0] != "+":
                hunks[-1].before.append(line[1:])
            if line[0] != "-":
                hunks[-1].after.append(line[1:])
        elif hunks is not None:
            raise DiffError(f"line {number}: {line.rstrip()!r} is no line of a unified diff")
    return files


def apply_hunks(text: str, hunks: list[Hunk]) -> str:
    """The text with all hunks applied, in order.

    Raises:
        DiffError: the lines of a hunk are not in the text, behind those of the hunk before it.
    """
    lines = text.splitlines(keepends=True)
    start, moved = 0, 0
    for hunk in hunks:
        expected = hunk.before_line - 1 + moved
        size = len(hunk.before)
        places = [
            i
            for i in range(start, len(lines) - size + 1)
            if lines[i] == hunk.before[0] and lines[i : i + size] == hunk.before
        ]
        if not places:
            raise DiffError(
                f"the lines of hunk @@ -{hunk.before_line} @@ are not in the file:"
                f" {hunk.before[0].rstrip()!r} ..."
            )
        at = min(places, key=lambda i: abs(i - expected))
        lines[at : at + size] = hunk.after
        start = at + len(hunk.after)
        moved = at - (hunk.before_line - 1) + len(hunk.after) - size
    return "".join(lines)
