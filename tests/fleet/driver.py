"""Disturb tiny runs at chosen points, and check that nothing is lost or trained twice.

python -m tests.fleet.driver --point kill:generator-0:decoding   # also several, in one run
python -m tests.fleet.driver --all --table faults.md             # the list of `points`
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.weights.store import FOLDER_PREFIX, remove_unused
from tests.fleet.faults import EVALUATED_EVERY, Fault, can_cut
from tests.fleet.tiny_run import COMPLETIONS, MAX_LAG, PROMPTS, TinyRun, adopt_orphans, prepare

END_SECONDS = 400.0
STEPS_PER_FAULT, STEPS_PER_START = 5, 200
"""Steps of a run for each of its faults; for one that is the time of another start's imports."""
UPSTREAM = re.compile(
    rf"torchelastic_\w+|torchinductor_\w+|vllm_dist_\S+|megatron_rl_{os.getuid()}"
    r"|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
)
"""Temporary files of torchrun and vLLM, and the folder of signs of life."""


def expected_prompts(run: TinyRun, steps: int) -> list[list[int]]:
    """Return the prompts of each step of a run that nothing disturbs."""
    from tokenizers import Tokenizer

    from megatron_rl.config import load_config
    from megatron_rl.data import load_prompts
    from megatron_rl.orchestrator.steps import StepBuilder

    config = load_config(run.output / "config.yaml")
    assert config.start_checkpoint is not None
    tokenizer = Tokenizer.from_file(str(config.start_checkpoint / "tokenizer.json"))
    stream = StepBuilder(config, load_prompts(config, tokenizer)).stream
    return [[stream.next() for _ in range(PROMPTS)] for _ in range(steps)]


def problems(run: TinyRun) -> list[str]:
    """Return what is wrong with a run that has ended."""
    wrong = []
    steps = [row for row in run.rows if row["kind"] == "step"]
    if [row["step"] for row in steps] != list(range(run.total)):
        wrong.append(f"steps {[row['step'] for row in steps]}")
    prompts = expected_prompts(run, run.total)
    dropped = [
        json.loads(line)
        for path in sorted(run.output.glob("metrics.dropped-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    for row in [*steps, *(row for row in dropped if row["kind"] == "step")]:
        if row["prompt_ids"] != prompts[row["step"]]:
            wrong.append(f"step {row['step']}: prompts {row['prompt_ids']}")
        if row["completions"] != PROMPTS * COMPLETIONS:
            wrong.append(f"step {row['step']}: {row['completions']} completions")
        if row["lag_max"] > MAX_LAG:
            wrong.append(f"step {row['step']}: lag {row['lag_max']}")
    evaluated = [row["step"] for row in run.rows if row["kind"] == "eval"]
    if not evaluations_fit(run, evaluated):
        wrong.append(f"evaluations {evaluated}")
    for event in ("empty_batch", "prompt_failed"):
        if run.events(event):
            wrong.append(f"{len(run.events(event))} times {event}")
    return wrong


def evaluations_fit(run: TinyRun, evaluated: list[int]) -> bool:
    """Return True if all planned evaluations were made once, or replaced where a start resumed."""
    planned = {*range(0, run.total, EVALUATED_EVERY), run.total}
    resumed = {row["step"] for row in run.events("resumed")}
    others, lost = set(evaluated) - planned, planned - set(evaluated)
    replaced = all(any(step < other for other in resumed & set(evaluated)) for step in lost)
    ordered = evaluated == sorted(set(evaluated))
    return ordered and others <= resumed and len(others) <= len(lost) and replaced


def left_behind(run: TinyRun) -> list[str]:
    """Return what a run left, without what the packages leave that it stands on."""
    return [p for p in run.left_behind() if not UPSTREAM.fullmatch(Path(p).name)]


def disturb(
    run: TinyRun,
    faults: Sequence[Fault],
    trainers: int,
    generators: int,
    report: Callable[[str], None],
) -> list[str]:
    """Start a run, inject faults one after the other, wait for the end; return what is wrong.

    `report` is called with the row of each fault.
    """
    run.start(trainers, generators)
    for fault in faults:
        fault.run(run)
        report(row_of(fault))
        if fault.problem:
            return [fault.problem]
        if fault.ends_run:
            run.start(trainers, generators, resume=True)
    agent = run.agent
    assert agent is not None
    if not run.wait(lambda: agent.poll() is not None, END_SECONDS):
        return [f"the run did not end within {END_SECONDS:g} s", *problems(run)]
    status = agent.returncode
    if any(fault.action == "kill" and fault.role.startswith("joined") for fault in faults):
        # What a process that no other one starts again has left is removed at the next start.
        remove_unused(run.memory, FOLDER_PREFIX)
    return [*([f"exit status {status}"] if status else []), *problems(run), *left_behind(run)]


def row_of(fault: Fault) -> str:
    """Return the row of the table."""
    seconds = ["" if s is None else f"{s:.1f}" for s in (fault.noticed, fault.recovered)]
    return f"| {fault.point} | {' | '.join(seconds)} | {fault.problem or 'ok'} | {fault.line} |"


def run_group(
    config: Path,
    points: Sequence[str],
    keep: Path,
    extra: Sequence[str],
    report: Callable[[str], None],
) -> list[str]:
    """Run several points, one after the other, in one run; return what is wrong.

    Its log and metrics are copied to `keep`; `report` is called with rows of the table.
    """
    faults = [Fault(point) for point in points]
    generators = 1 + any("generator-1" in point or "core-1" in point for point in points)
    seconds = sum(fault.action in ("second", "join") for fault in faults)
    total = STEPS_PER_FAULT * (len(faults) + 1) + STEPS_PER_START * seconds
    run = TinyRun(config, total, extra)
    try:
        wrong = disturb(run, faults, trainers=2, generators=generators, report=report)
        report(f"| end of the run: {', '.join(points)} | | | {'; '.join(wrong) or 'ok'} | |")
        keep.mkdir(parents=True, exist_ok=True)
        name = points[0].replace(":", "_") if points else "none"
        processes = [f"{role}: process {p.pid}" for role, p in run.roles().items()]
        lines = [*(row_of(fault) for fault in faults), *wrong, *processes, run.text()]
        (keep / f"{name}.log").write_text("\n".join(lines))
        for path in run.output.glob("metrics*.jsonl"):
            shutil.copy(path, keep / f"{name}.{path.name}")
    finally:
        run.close()
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--point", default=None, help="one, or several of one run, by commas")
    parser.add_argument("--all", action="store_true", help="the whole list")
    parser.add_argument("--first", type=int, default=0, help="number of the first run of the list")
    parser.add_argument("--base", type=Path, default=Path("/tmp/megatron_rl_faults"))
    parser.add_argument("--table", type=Path, default=None, help="file to append the results to")
    options, extra = parser.parse_known_args()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what it has started
    config = prepare(options.base)
    from tests.fleet.points import RUNS

    groups = RUNS[options.first :] if options.all else [tuple(filter(None, [options.point]))]
    if options.point:
        groups = [tuple(options.point.split(","))]

    def report(row: str) -> None:
        print(time.strftime("%H:%M:%S"), row, flush=True)
        if options.table is not None:
            with options.table.open("a") as table:
                table.write(f"{row}\n")

    failed = False
    for group in groups:
        if any(p.startswith("cut") for p in group) and not can_cut():
            report(f"| {', '.join(group)} | | | skipped: the kernel aborts no connections | |")
            continue
        failed |= bool(run_group(config, group, options.base / "logs", extra, report))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
