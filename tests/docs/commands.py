"""The commands that README, docs and examples show: found, and told apart by who runs them.

A fenced block of shell commands is run by a test unless

- the line before it is `<!-- needs GPUs -->`, or the command's own comment says `# needs GPUs`;
- `covered.COVERED` names the test that runs the same thing.

The head of a script or YAML file under examples/ shows commands as comments: `#   bash FILE ...`.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("bash", "sh", "shell", "console")
MARK = "<!-- needs GPUs -->"
COMMENT_MARK = "needs GPUs"
TOOLS = (
    *("megatron-rl", "torchrun", "make", "bash", "python", "python3", "pip", "docker"),
    *("kubectl", "sbatch", "srun", "source", "nvidia-smi"),
)
_SHOWN = re.compile(rf"^#\s{{2,}}((?:[A-Z_]+=\S+ )*(?:{'|'.join(TOOLS)})\s.*)$")


@dataclass(frozen=True, slots=True)
class Command:
    """One command as a reader would type it."""

    file: str
    line: int
    text: str
    """Without comment, continued lines joined."""
    needs_gpus: bool


def documents() -> list[Path]:
    """Every file whose commands count."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found += [p for p in sorted(ROOT.glob("*/README.md")) if p.parent.name not in ("docs",)]
    examples = (ROOT / "examples").rglob("*")
    return found + [p for p in sorted(examples) if p.suffix in (".sh", ".yaml", ".py")]


def without_comment(line: str) -> tuple[str, str]:
    """(command, comment) of a shell line."""
    for at, character in enumerate(line):
        if character == "#" and (at == 0 or line[at - 1].isspace()):
            before = line[:at]
            if before.count("'") % 2 == 0 and before.count('"') % 2 == 0:
                return before.rstrip(), line[at + 1 :].strip()
    return line.rstrip(), ""


def _joined(lines: list[tuple[int, str]]) -> list[tuple[int, str, str]]:
    """(line, command, comment), with continued lines joined."""
    found: list[tuple[int, str, str]] = []
    pending: tuple[int, str] | None = None
    for number, line in lines:
        command, comment = without_comment(line)
        if pending is not None:
            number, command = pending[0], f"{pending[1]} {command.strip()}"
        if command.endswith("\\"):
            pending = (number, command[:-1].rstrip())
            continue
        pending = None
        if command.strip():
            found.append((number, command.strip(), comment))
    return found


def blocks(text: str) -> list[tuple[bool, list[tuple[int, str]]]]:
    """(marked for GPUs, numbered lines) of every fenced block of shell commands."""
    found: list[tuple[bool, list[tuple[int, str]]]] = []
    inside: list[tuple[int, str]] | None = None
    fence, before = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if fence:
            if stripped == fence:
                fence, inside = "", None
            elif inside is not None:
                inside.append((number, line))
            continue
        if match := re.match(r"(`{3,}|~{3,})\s*(\w*)", stripped):
            fence = match[1]
            if match[2] in LANGUAGES:
                inside = []
                found.append((before == MARK, inside))
        elif stripped:
            before = stripped
        if fence:
            before = ""
    return found


def commands_of(path: Path) -> list[Command]:
    """All commands that a file shows."""
    name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [
            Command(name, number, command, marked or COMMENT_MARK in comment)
            for marked, lines in blocks(text)
            for number, command, comment in _joined(lines)
        ]
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("#") and line.strip() and number > 40:
            break
        if match := _SHOWN.match(line):
            command, comment = without_comment(match[1])
            found.append(Command(name, number, command, COMMENT_MARK in comment))
    return found


def all_commands() -> list[Command]:
    """Every command of every document."""
    return [command for path in documents() for command in commands_of(path)]


_INLINE = re.compile(r"`(megatron-rl [^`]+)`")


def mentions() -> list[Command]:
    """`megatron-rl ...` in running text: not run, but its command and options must exist."""
    found = []
    for path in (p for p in documents() if p.suffix == ".md"):
        fenced = {n for _, lines in blocks(path.read_text()) for n, _ in lines}
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if number not in fenced:
                name = str(path.relative_to(ROOT))
                found += [Command(name, number, t, False) for t in _INLINE.findall(line)]
    return found


def words(command: Command) -> list[str]:
    """The command's words; variables and patterns stay as they are written."""
    return shlex.split(command.text)
