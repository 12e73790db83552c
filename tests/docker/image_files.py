"""The Dockerfile's instructions, the locks' pins, and the steps in a folder of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LOCKS = ("tools", "trainer", "generator")
PLATFORMS = ("x86_64", "aarch64")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)


class Instruction(NamedTuple):
    """One instruction of the Dockerfile, continuation lines joined."""

    stage: str
    """Name of the stage; empty for the last one."""
    name: str
    """RUN, COPY, ..."""
    text: str


def instructions() -> list[Instruction]:
    """Return the Dockerfile's instructions in order."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    parsed, stage = [], ""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            stage = rest.partition(" AS ")[2]
        if name:
            parsed.append(Instruction(stage, name, rest))
    return parsed


def environment() -> dict[str, str]:
    """Return the variables that the Dockerfile sets in the image."""
    lines = [i.text for i in instructions() if i.name == "ENV" and i.stage in ("", "base")]
    return dict(pair.split("=", 1) for line in lines for pair in line.split())


def steps() -> list[str]:
    """Return the steps that the Dockerfile runs, in order."""
    runs = [i.text for i in instructions() if i.name == "RUN"]
    return [s for r in runs for part in re.findall(r"steps\.sh ([a-z ]+)", r) for s in part.split()]


def lock_blocks(name: str) -> list[str]:
    """Return the packages of a lock, each with its hashes."""
    return re.split(r"\n(?=\S)", (ROOT / "docker" / f"{name}.lock").read_text().strip())


def pins(name: str) -> dict[str, str]:
    """Return package -> version of a lock."""
    return dict(PIN.findall((ROOT / "docker" / f"{name}.lock").read_text()))


def context(folder: Path) -> Path:
    """Copy the files of the checkout that the Dockerfile copies, and no others."""
    for instruction in instructions():
        if instruction.name != "COPY" or instruction.text.startswith("--from"):
            continue
        *sources, target = instruction.text.split()
        for source in sources:
            path, goal = ROOT / source, folder / target
            if path.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.ptxas")
                shutil.copytree(path, goal, symlinks=True, ignore=ignore, dirs_exist_ok=True)
            else:
                goal = goal / path.name if target.endswith("/") else goal
                goal.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, goal)
    return folder


def run(*command: str | Path, seconds: float = 280, where: Path = ROOT, **variables: str) -> str:
    """Run a command and return its output; an error fails the test with it."""
    done = attempt(*command, seconds=seconds, where=where, **variables)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


def attempt(
    *command: str | Path, seconds: float = 280, where: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command; it may fail."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=where, capture_output=True, text=True, timeout=seconds, check=False,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **variables},
    )  # fmt: skip
