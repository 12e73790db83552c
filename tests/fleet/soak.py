"""A run under random faults for half an hour: nothing lost or trained twice, nothing grows.

    python -m tests.fleet.soak --minutes 30 --every 45 --seed 0 --out soak.json

A fault comes about every so many seconds, at a random moment, to a random process. Memory and open
files of each process are compared between its first sample after `WARM_SECONDS` and its last one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.fleet.driver import left_behind, problems
from tests.fleet.faults import Fault, can_cut
from tests.fleet.tiny_run import TinyRun, adopt_orphans, prepare

WARM_SECONDS = 120.0
SAMPLE_SECONDS = 5.0
GROWTH = 1.10
ACTIONS = {  # action -> (share of the faults, roles)
    "kill": (10, ("generator-0", "core-0", "generator-1", "core-1", "rank1", "orchestrator")),
    "stop2": (3, ("generator-0", "core-1", "rank0", "rank1", "orchestrator")),
    "stop15": (2, ("generator-0", "generator-1")),
    "cut": (5, ("all", "generator-0", "generator-1", "rank0")),
}
MOMENTS = ("decoding", "updating", "publishing", "checkpoint", "evaluation")


@dataclass
class Sample:
    """One process at one time."""

    age: float
    mebibytes: float
    files: int


class Growth:
    """Samples the memory and the open files of all roles of a run, in a thread."""

    def __init__(self, run: TinyRun) -> None:
        self._run, self._end = run, threading.Event()
        self.samples: dict[tuple[str, int], list[Sample]] = defaultdict(list)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            if not self._run.steps:  # the engine may be starting
                continue
            for role, process in self._run.roles().items():
                with contextlib.suppress(psutil.Error):
                    age = time.time() - process.create_time()
                    size = process.memory_info().rss / 2**20
                    one = Sample(age, size, process.num_fds())
                    self.samples[role, process.pid].append(one)

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def report(self) -> dict[str, dict[str, Any]]:
        """Return, by role, the worst growth of one process since it was warm."""
        roles: dict[str, dict[str, Any]] = {}
        for (role, _), samples in self.samples.items():
            warm = [s for s in samples if s.age > WARM_SECONDS]
            if len(warm) < 2:
                continue
            first, last = warm[0], warm[-1]
            row = roles.setdefault(
                role, {"processes": 0, "seconds": 0.0, "memory": 0.0, "files": 0.0}
            )
            row["processes"] += 1
            row["seconds"] = max(row["seconds"], last.age - first.age)
            row["memory"] = max(row["memory"], last.mebibytes / first.mebibytes)
            row["files"] = max(row["files"], last.files / first.files)
            row["mebibytes"], row["open_files"] = last.mebibytes, last.files
        return roles


def soak(config: Path, minutes: float, every: float, seed: int) -> dict[str, Any]:
    """Run for so long with a fault every so many seconds; return what happened."""
    rng = random.Random(seed)
    actions = {a: v for a, v in ACTIONS.items() if a != "cut" or can_cut()}
    # Far more steps than the time allows: the run is interrupted and resumed with its true end.
    run = TinyRun(config, total=10**6)
    begun, faults, wrong, growth = time.monotonic(), list[Fault](), list[str](), Growth(run)
    try:
        run.start(trainers=2, generators=2)
        while (left := begun + 60 * minutes - time.monotonic()) > 0 and not wrong:
            time.sleep(min(rng.uniform(0.5, 1.5) * every, left))
            (action,) = rng.choices(list(actions), [share for share, _ in actions.values()])
            fault = Fault(f"{action}:{rng.choice(actions[action][1])}:{rng.choice(MOMENTS)}")
            fault.run(run)
            faults.append(fault)
            print(f"{time.monotonic() - begun:.0f} s, step {run.steps}: {fault}", flush=True)
            wrong += [fault.problem] if fault.problem else []
        growth.close()  # before processes end
        wrong += _finish(run)
    finally:
        growth.close()
        text, rows = run.text(), run.rows
        run.close()
    return {
        "seed": seed,
        "minutes": (time.monotonic() - begun) / 60,
        "steps": run.total,
        "faults": [[f.point, f.noticed, f.recovered, f.problem] for f in faults],
        "engines_started_again": len(re.findall("is started again", text)),
        # Every generator that gets work loads the weights of every step; dropped rows not counted.
        "updates_at_least": sum(row["generators"] for row in rows if row["kind"] == "step"),
        "growth": growth.report(),
        "wrong": wrong,
    }


def _finish(run: TinyRun) -> list[str]:
    """Interrupt the run and resume it to an end that is near; return what is wrong with it."""
    agent = run.agent
    assert agent is not None
    agent.terminate()
    if not run.wait(lambda: not run.processes(), 120):
        return ["processes live on after SIGTERM"]
    run.total = run.steps + 6
    run.start(trainers=2, generators=2, resume=True)
    agent = run.agent
    if not run.wait(lambda: agent.poll() is not None, 300):
        return ["the resumed run does not end"]
    status = [f"exit status {agent.returncode}"] if agent.returncode else []
    return [*status, *problems(run), *left_behind(run)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=45)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", type=Path, default=Path("/tmp/megatron_rl_faults"))
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    adopt_orphans()
    result = soak(prepare(options.base), options.minutes, options.every, options.seed)
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    grown = [r for r, g in result["growth"].items() if max(g["memory"], g["files"]) > GROWTH]
    print("grown:", ", ".join(grown) or "nothing")
    sys.exit(bool(result["wrong"] or grown))


if __name__ == "__main__":
    main()
