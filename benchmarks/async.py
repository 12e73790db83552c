"""Asynchronous against lock-step training on one machine, and what `plan --simulate` predicts.

    python benchmarks/async.py [--rounds 3] [--out benchmarks/results/async.md]
    python benchmarks/async.py --model DIRECTORY --steps 12 --phase 2 --completions 4 --tokens 8 48

The same prompts, lengths and seed in the modes `synchronous`, `ppo_off_policy` and `pipeline`, one
run of each in every round, lock-step first. Each role has one thread, as if a machine of its own.
Lengths are equal in all modes, which is checked: the copy of the model has no end-of-sequence
token, so every completion uses up its budget of thinking, which is drawn by seed and group, and
then that of its answer. The result is written after each run, so what is measured stays.
Rewards differ by a length penalty alone and the learning rate is tiny: every batch is trained
whole. A predicted rate is of the simulator with the times measured in the lock-step run of the
round; in the last column with those of the run itself, so that it shows the error of the model of
the loop without that of roles which slow each other down.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import commit, processor
from megatron_rl.commands.plan.loop_simulation import LoopRates, LoopSimulation
from megatron_rl.commands.plan.loop_times import RecordedLoop, recorded_loop
from tests.e2e.processes import ONE_RANK, ROOT
from tests.fleet.tiny_run import TinyRun, adopt_orphans
from tests.trainer.sft_cases import write_rows

LOCK_STEP = "synchronous"
MODES = {LOCK_STEP: "", "ppo_off_policy": "updates_per_phase", "pipeline": "max_lag_steps"}
"""Mode -> its key that --phase sets."""
MARKER, ANSWER = "=;=;=", 2
"""End of thinking, which no model samples, and the tokens after it."""
LIMIT = 3600.0
GOAL, ERROR_GOAL = 1.6, 0.1
END_KEYS = ("eos_token", "eos_token_id")


def endless_model(model: str, folder: Path) -> Path:
    """Return a copy of a model that never ends by itself; a named one is made first."""
    source = Path(model)
    if not source.is_dir():
        config = {"model": model, "roles": {"trainer_ranks": 1, "generator_ranks": 0}}
        config |= {"precision": {"params": "fp32"}, "sft": {"steps": 2}}
        config |= {"task": {"kind": "arithmetic"}, "output_dir": str(folder / "sft")}
        path = folder / "sft.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "megatron_rl.cli", "sft", "--config", str(path)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **ONE_RANK}, timeout=600, check=True)
        (source,) = (folder / "sft" / "start").iterdir()
    target = shutil.copytree(source, folder / "model")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (path := target / name).exists():
            values = json.loads(path.read_text())
            path.write_text(json.dumps({k: v for k, v in values.items() if k not in END_KEYS}))
    return target


def write_config(model: str, folder: Path, options: argparse.Namespace) -> Path:
    """Write the configuration of all runs; return its path."""
    directory = endless_model(model, folder)
    sums = [(a, b) for a in range(99) for b in range(9)]
    questions = [{"prompt": f"{a}+{b}=?", "answer": f"{a + b}"} for a, b in sums]
    source = write_rows(folder / "questions.jsonl", questions)
    start = {"model": str(directory)}
    if not Path(model).is_dir():
        start = {"model": model, "start_checkpoint": str(directory)}
    longest = options.tokens[1] + ANSWER
    config: dict[str, Any] = {
        **start,
        "precision": {"params": "fp32"},
        "task": {"kind": "jsonl", "path": f"{source}", "verifier": "exact", "heldout_prompts": 1},
        "schedule": {
            "prompts_per_step": options.prompts,
            "completions_per_prompt": options.completions,
            "micro_batch_tokens": 4096,
        },
        "generation": {
            "interruption_phrase": MARKER,
            "think_start": "",
            "think_end": MARKER,
            "max_prompt_tokens": 72,
            "thinking_budget_tokens": options.tokens,
            "answer_budget_tokens": ANSWER,
            "concurrent_completions": options.concurrent,
            "kv_cache_gib": 0.5,
        },
        "algorithm": {
            "zero_variance_filter": False,
            "truncated": "train",
            "no_positive_resampling": False,
            "length_penalty": "all",
            "length_max_tokens": longest,
            "length_cache_tokens": longest,
        },
        "optimizer": {"learning_rate": 1e-9, "warmup_steps": 0},
        # At the first step, which does not count, and after the last one.
        "evaluation": {"samples_per_prompt": 1, "every_steps": 10**6},
        "checkpoint": {"every_steps": 10**6},
        "fleet": {"trainer_restarts": 0, "generator_restarts": 0},
        "metrics": {"logprob_check_every_steps": 10**6, "rollouts_ratios": False},
    }
    path = folder / "async.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def measure(config: Path, mode: str, options: argparse.Namespace) -> RecordedLoop:
    """Train in one mode; return what the run recorded."""
    settings = [f"--schedule.mode={mode}"]
    settings += [f"--schedule.{key}={options.phase}" for key in [MODES[mode]] if key]
    run = TinyRun(config, options.steps, settings)
    try:
        run.start(trainers=1, generators=options.engines)
        agent = run.agent
        assert agent is not None
        if not run.wait(lambda: agent.poll() is not None, LIMIT, 0.5) or agent.returncode:
            raise SystemExit(f"{mode}: no good end within {LIMIT:g} s\n{run.text()[-3000:]}")
        skip = 2 * options.phase if options.skip is None else options.skip
        return recorded_loop(run.output, skip)
    finally:
        run.close()


def check_lengths(mode: str, loops: dict[str, RecordedLoop], groups: int) -> None:
    """Refuse a run whose completions are not as long as those of lock-step."""
    for group in range(groups):
        own, other = (list(loops[name].lengths(group)) for name in (mode, LOCK_STEP))
        if own != other:
            raise SystemExit(
                f"{mode}: group {group} has completions of {own} tokens, in lock-step {other}:"
                " the modes cannot be compared. Does the model end by a token that is not an"
                f" {END_KEYS[0]}, or sample {MARKER}?"
            )


def predict(loop: RecordedLoop, source: RecordedLoop) -> LoopRates:
    """Return the simulator's rates of a run's steps, with the times and lengths of another run."""
    return LoopSimulation(loop.run, source.times, source.lengths).rates(loop.steps)


def row(number: int, mode: str, loops: dict[str, RecordedLoop]) -> dict[str, Any]:
    """Return what was measured of a run, next to what is predicted."""
    loop, lock_step = loops[mode], loops[LOCK_STEP]
    r = loop.rates
    predicted, own = predict(loop, lock_step), predict(loop, loop)
    return {
        "round": number,
        "mode": mode,
        "steps_per_hour": r.steps_per_hour,
        "tokens_per_hour": r.tokens_per_hour,
        "trainer_busy": 1 - r.trainer_wait,
        "generator_busy": 1 - r.generator_wait,
        "pause_seconds": loop.times.pause,
        "ratio": r.steps_per_hour / lock_step.rates.steps_per_hour,
        "predicted": predicted.steps_per_hour,
        "error": predicted.steps_per_hour / r.steps_per_hour - 1,
        "error_of_own_times": own.steps_per_hour / r.steps_per_hour - 1,
        "lag_mean": r.lag_mean,
        "predicted_lag_mean": predicted.lag_mean,
        "decode_error": loop.decode_error,
        "load": os.getloadavg()[0],
    }


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Return the result as Markdown."""
    table = []
    for mode in MODES:
        if not (own := [r for r in rows if r["mode"] == mode]):
            continue
        m = {key: fmean(r[key] for r in own) for key in own[0] if key not in ("round", "mode")}
        table.append(
            f"| {mode} | {m['steps_per_hour']:,.0f} | {m['tokens_per_hour'] / 1e6:.3g}"
            f" | {m['trainer_busy']:.0%} | {m['generator_busy']:.0%} | {m['pause_seconds']:.3f}"
            f" | {m['lag_mean']:.2f} | {m['ratio']:.2f}"
            f" ({min(r['ratio'] for r in own):.2f} to {max(r['ratio'] for r in own):.2f})"
            f" | {m['predicted']:,.0f} | {m['error']:+.1%} | {m['error_of_own_times']:+.1%} |"
        )
    loads = [r["load"] for r in rows]
    low, high = options.tokens
    return "\n".join([
        "# Asynchronous against lock-step, and the simulator",
        "",
        f"`python benchmarks/async.py {' '.join(sys.argv[1:])}`, commit {commit()},",
        f"{time.strftime('%Y-%m-%d')}, {processor()}, load {min(loads):.1f} to {max(loads):.1f}.",
        f"{Path(options.model).name}: {rows[-1]['round'] + 1} of {options.rounds} rounds of"
        f" {options.steps} steps in each mode, one trainer rank and",
        f"{options.engines} engine(s): {options.prompts} prompts x {options.completions}"
        f" completions of {low + ANSWER} to {high + ANSWER} tokens without the marker,",
        f"{options.concurrent} at a time in an engine. Means over rounds; a phase, or the lag, has"
        f" {options.phase} steps.",
        "",
        "| mode | steps/h | M tokens/h | trainer busy | generators busy | pause [s] | lag"
        " | over lock-step | predicted steps/h | error | with own times |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *table,
        "",
        f"Goals: at least {GOAL:g} times lock-step, predicted within {ERROR_GOAL:.0%}.",
        "",
    ])  # fmt: skip


def main() -> None:
    """Measure in rounds; print each row, and write the result, as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny_scout", help="a tiny model, or a directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--phase", type=int, default=4, help="steps of a phase, or of the lag")
    parser.add_argument("--skip", type=int, help="steps that do not count (default: two phases)")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument("--completions", type=int, default=8, help="of a prompt")
    parser.add_argument("--tokens", type=int, nargs=2, default=[16, 160], help="range of budgets")
    parser.add_argument("--concurrent", type=int, default=32, help="completions in an engine")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # the run's processes, too
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="async_") as folder:
        config = write_config(options.model, Path(folder), options)
        for number in range(options.rounds):
            loops: dict[str, RecordedLoop] = {}
            others = [mode for mode in MODES if mode != LOCK_STEP]
            for mode in [LOCK_STEP, *others[:: 1 if number % 2 == 0 else -1]]:
                loops[mode] = measure(config, mode, options)
                check_lengths(mode, loops, options.steps * options.prompts)
                print(f"round {number}: {mode}: {loops[mode].times}", flush=True)
                rows.append(row(number, mode, loops))
                print(json.dumps(rows[-1]), flush=True)
                if options.out is not None:
                    options.out.write_text(report(rows, options))
    print(report(rows, options))


if __name__ == "__main__":
    main()
