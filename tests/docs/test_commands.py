"""Every command in README, docs and examples is run, covered by a test, or marked for GPUs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import typer

from tests.docs.commands import ROOT, Command, all_commands, blocks, mentions, words
from tests.docs.covered import COVERED

SHOWN = [c for c in all_commands() if not c.needs_gpus]


def covering(command: Command) -> str | None:
    return next((test for key, test in COVERED.items() if fnmatchcase(command.text, key)), None)


RUN = list({c.text: c for c in SHOWN if covering(c) is None}.values())


def name_of(command: Command) -> str:
    return f"{command.file}:{command.line}"


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A reader's folder: the checkout's own files, and results and configurations of theirs."""
    from tests.docs.desk import lay_out

    return lay_out(tmp_path_factory.mktemp("desk"))


@pytest.mark.parametrize("command", RUN, ids=name_of)
def test_a_shown_command_runs(command, desk):
    allowed = ("megatron-rl ", "python ", "bash ", "DRY_RUN=1 bash ")
    assert command.text.startswith(allowed), (
        f"{name_of(command)}: {command.text!r} is neither of this project's own commands, nor in"
        " tests/docs/covered.py, nor marked `# needs GPUs`"
    )
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command.text],
        cwd=desk, capture_output=True, text=True, timeout=250,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def functions_of(path: Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("key", COVERED)
def test_the_table_names_tests_that_exist_and_commands_that_are_shown(key):
    file, _, test = COVERED[key].partition("::")
    assert test == "*" or test in functions_of(ROOT / file), f"{COVERED[key]} is no test"
    assert any(fnmatchcase(c.text, key) for c in SHOWN), f"no document shows {key!r}"


def test_the_targets_of_the_makefile_are_there():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in SHOWN:
        if command.text.startswith("make "):
            assert words(command)[1] in targets, f"{name_of(command)}: {command.text}"


@pytest.mark.parametrize("mention", mentions(), ids=name_of)
def test_a_mentioned_command_and_its_options_exist(mention):
    from megatron_rl.cli import app

    group = typer.main.get_command(app)
    rest = words(mention)[1:]
    command = group
    # Not by isinstance: typer brings click classes of its own.
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        found = command.commands.get(rest[0])
        assert found is not None, f"{name_of(mention)}: `{mention.text}`: no command {rest[0]!r}"
        command, rest = found, rest[1:]
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    free = command.context_settings.get("ignore_unknown_options", False)
    for word in rest:
        option = word.split("=")[0]
        if option.startswith("--") and not (free and option not in known):
            assert option in known | {"--help"}, f"{name_of(mention)}: {option} is no option"


def test_the_reader_of_documents_sees_blocks_marks_comments_and_continued_lines(tmp_path):
    from tests.docs import commands

    text = (
        "```bash\nmegatron-rl fit a \\\n  --r0 '#1'   # a comment\n# only a comment\n```\n"
        "<!-- needs GPUs -->\n```sh\nnvidia-smi\n```\n"
        "```text\nnot a command\n```\n```bash\ntorchrun x   # needs GPUs\n```\n"
    )
    marked, plain = [m for m, _ in blocks(text)], [lines for _, lines in blocks(text)]
    assert marked == [False, True, False]
    assert commands._joined(plain[0]) == [(2, "megatron-rl fit a --r0 '#1'", "a comment")]
    assert commands._joined(plain[2]) == [(14, "torchrun x", "needs GPUs")]


def test_the_documents_build_without_warnings(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()


def test_every_link_of_the_readme_leads_to_a_file():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (ROOT / target).exists(), target
