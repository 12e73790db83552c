"""Dockerfile and shell scripts pass their linters, all of them, wherever they lie."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.docker.image_files import BIN, ROOT, run


def shell_scripts() -> list[Path]:
    """Return the scripts of the checkout whose first line names a shell."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    ).stdout.split("\0")  # fmt: skip
    scripts = []
    for path in (ROOT / name for name in names if name):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                first = file.readline(200)
            if first.startswith(b"#!") and first.split()[-1].endswith(b"sh"):
                scripts.append(path)
    return scripts


def test_the_dockerfile_passes_its_linter():
    run(BIN / "hadolint", "--failure-threshold", "info", "Dockerfile")


def test_every_shell_script_passes_its_linter():
    scripts = shell_scripts()
    # The launch scripts are Python behind one line of bash.
    python = [s for s in scripts if s.read_text().splitlines()[1].startswith('"exec" ')]
    assert {p.parent for p in python} == {ROOT / "examples"}
    shell = [s for s in scripts if s not in python]
    for folder in (".ci", "docker", "scripts", "examples/cluster"):
        assert any(s.parent == ROOT / folder for s in shell), folder
    run(BIN / "shellcheck", *shell)
