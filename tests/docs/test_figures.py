"""benchmarks/README.md lists every result and script, and its commands exist; none is run."""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "README.md"
HELP = "Add a row to benchmarks/README.md: figure, command in backticks, link to its result; a"
HELP += " script without a result goes in the table 'Other scripts'."
COMMAND = re.compile(r"`((?:python|bash|docker/)[^`]*)`")
NAMES = {
    "command": re.compile(r"`(?:python|bash|docker/)[^`]*`|\"command\": \"\w"),
    "processor": re.compile(
        r"AMD EPYC|Xeon|\d+ cores of|processor(?:\W+not recorded| does not matter)"
    ),
    "date": re.compile(r"20\d\d-\d\d-\d\d|date\W+not recorded"),
}


def tracked(pattern: str) -> list[str]:
    """Return the paths of the repository's existing files that match a pattern of git."""
    done = subprocess.check_output(["git", "ls-files", pattern], cwd=ROOT, text=True)
    return [path for path in done.split() if (ROOT / path).exists()]


def unlisted(page: str, results: list[str], scripts: list[str]) -> list[str]:
    """Return results that no link reaches, and scripts that no command or table names.

    A result is reached through another one, too: a picture, or the JSON of a Markdown file.
    """
    links = {f"benchmarks/{link}" for link in re.findall(r"\]\((results/[^)]+)\)", page)}
    stems = {Path(link).stem for link in links}
    named = set(re.findall(r"benchmarks/[\w/]+\.(?:py|sh)", page))
    named |= {f"{m.replace('.', '/')}.py" for m in re.findall(r"-m (benchmarks[\w.]+)", page)}
    missing = [r for r in results if r not in links and Path(r).stem not in stems]
    return missing + [s for s in scripts if s not in named]


def words_of(path: Path) -> set[str]:
    """Return the options and subcommands that a script's argparse declares."""
    if path.suffix == ".sh":
        return set(re.findall(r"--?[\w-]+|\b\w+(?=\))", path.read_text()))
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    calls = [c for c in calls if getattr(c.func, "attr", "") in ("add_argument", "add_parser")]
    arguments = [argument for call in calls for argument in call.args]
    return {str(a.value) for a in arguments if isinstance(a, ast.Constant)}


def problem(command: str) -> str | None:
    """Return what does not exist of a command: its script, an option, a subcommand."""
    words = shlex.split(command)
    if words[:2] == ["python", "-m"]:
        script, rest = f"{words[2].replace('.', '/')}.py", words[3:]
    elif words[0] in ("python", "bash"):
        script, rest = words[1], words[2:]
    else:
        script, rest = words[0], words[1:]
    if not (ROOT / script).is_file():
        return f"{command}: no file {script}"
    known = words_of(ROOT / script)
    parts = re.findall(r"add_parser\(\"(\w+)\"", (ROOT / script).read_text())
    if parts and rest[0] not in parts:
        return f"{command}: no part {rest[0]}"
    unknown = [w for w in rest if w.startswith("-") and w not in known]
    return f"{command}: {script} has no option {unknown[0]}" if unknown else None


def commands(page: str) -> Iterator[tuple[str, str]]:
    """Yield each row with a link to a result, and its command ("" without one)."""
    for row in page.splitlines():
        if row.startswith("|") and "](results/" in row:
            found = COMMAND.search(row)
            yield row, found[1] if found else ""


def unnamed(text: str) -> list[str]:
    """Return which of command, processor and date a result does not name."""
    return [name for name, pattern in NAMES.items() if not pattern.search(text)]


def test_every_result_and_every_script_is_listed() -> None:
    results = tracked("benchmarks/results/*")
    scripts = tracked("benchmarks/*.py") + tracked("benchmarks/*.sh")
    assert len(results) > 20 and len(scripts) > 20
    missing = unlisted(PAGE.read_text(), results, scripts)
    assert not missing, f"not in benchmarks/README.md: {', '.join(missing)}. {HELP}"


def test_every_figure_has_a_command_that_exists_and_every_link_leads_to_a_file() -> None:
    page = PAGE.read_text()
    rows = list(commands(page))
    assert len(rows) > 20
    assert not [row for row, command in rows if not command], HELP
    assert not [p for _, command in rows if (p := problem(command))]
    links = re.findall(r"\]\((results/[^)]+)\)", page)
    links += [f"../{s}" for s in re.findall(r"`(benchmarks/[\w/]+\.(?:py|sh))`", page)]
    assert not [link for link in links if not (PAGE.parent / link).is_file()]


def test_every_result_names_its_command_processor_and_date() -> None:
    paths = [p for p in tracked("benchmarks/results/*") if p.endswith((".md", ".json"))]
    texts = {path: (ROOT / path).read_text() for path in paths}
    for path in paths:
        if path.endswith(".json"):
            texts[path] += texts.get(path.replace(".json", ".md"), "")
    wrong = {path: names for path, text in texts.items() if (names := unnamed(text))}
    assert not wrong, f"results that do not name these: {wrong}. Where unknown: 'not recorded'"


@pytest.mark.parametrize(
    "command",
    [
        "python benchmarks/gone.py",
        "python -m benchmarks.rewards.gone",
        "python benchmarks/kernels.py --fast",
        "python benchmarks/weights.py fan",
        "docker/standin/build.sh lean --fast",
    ],
)
def test_a_command_that_does_not_exist_is_reported(command: str) -> None:
    assert problem(command)


def test_a_result_without_its_origin_or_row_is_reported() -> None:
    assert unnamed("# Title\n\nA table.") == ["command", "processor", "date"]
    assert not unnamed("`python a.py`, 2 cores of X, 2026-12-02")
    page = "| `python benchmarks/a.py` | [a](results/a.md) |"
    results = ["benchmarks/results/a.md", "benchmarks/results/a.json", "benchmarks/results/b.md"]
    scripts = ["benchmarks/a.py", "benchmarks/b.py"]
    assert unlisted(page, results, scripts) == ["benchmarks/results/b.md", "benchmarks/b.py"]
