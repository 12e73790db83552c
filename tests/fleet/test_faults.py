"""Runs that lose processes and connections end as if nothing had happened; a part of `points`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import ROOT
from tests.fleet.faults import can_cut
from tests.fleet.tiny_run import SILENCE

asked_for = pytest.mark.skipif(
    os.environ.get("MEGATRON_RL_FAULTS") != "1",
    reason="6 minutes of real runs that are disturbed: MEGATRON_RL_FAULTS=1 runs them",
)
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SECONDS = 600


@pytest.fixture
def base(tiny_start: Path) -> Path:
    return tiny_start


def disturb(base: Path, *points: str) -> dict[str, list[str]]:
    """Run these points in one run; return the columns of the table by point.

    The driver takes in orphans, which no other test's process should.
    """
    table = base / f"{len(list(base.glob('*.md')))}.md"
    command = [sys.executable, "-m", "tests.fleet.driver", "--base", f"{base}"]
    command += ["--point", ",".join(points), "--table", f"{table}"]
    done = subprocess.run(command, cwd=ROOT, timeout=SECONDS, capture_output=True, text=True)
    logs = "".join(path.read_text()[-6000:] for path in (base / "logs").glob("*.log"))
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-2000:]}{logs}"
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in table.read_text().splitlines()
    ]
    return {row[0]: row[1:] for row in rows}


def survive(base: Path, *points: str) -> None:
    """Run these points in one run; each is noticed in time, and nothing is lost or made twice."""
    table = disturb(base, *points)
    for point in points:
        limit = SILENCE + 15 * point.startswith("stop15") + 10
        assert point.startswith("cut") or float(table[point][0]) < limit, point
        assert table[point][2] == "ok"


def test_a_run_survives_a_fault_of_each_kind(base):
    cuts = ["cut:all:decoding"] if can_cut() else []
    survive(base, "kill:generator-0:decoding", *cuts, "kill:rank1:updating")


@asked_for
def test_a_run_survives_the_loss_of_each_of_its_processes(base):
    survive(
        base,
        "kill:core-0:evaluation",
        "stop15:generator-0:decoding",
        "kill:orchestrator:decoding",
        "kill:rank0:checkpoint",
    )


@asked_for
def test_connections_and_engines_come_and_go(base):
    cuts = ["cut:all:decoding", "cut:generator-0:updating", "cut:rank0:checkpoint"]
    table = disturb(
        base,
        *(cuts if can_cut() else []),
        "join:2:now",
        "term:joined0:decoding",
        "kill:joined1:decoding",
    )
    assert {columns[2] for columns in table.values()} == {"ok"}
