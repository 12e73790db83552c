"""The runs of an ablation: one `megatron-rl train` after the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from megatron_rl.config import ConfigError, RunConfig, load_config
from megatron_rl.metrics.metrics_file import Row, last_rows, read_metrics

TINY = Path(__file__).with_name("tiny.yaml")
POLL_SECONDS = 0.5
STOP_SECONDS = 120.0


class RunFailed(RuntimeError):
    """A run that ended before its last step; the message names its log."""


@dataclass(frozen=True, slots=True)
class Ablation:
    """Every recipe with every seed; the options of the command explain the fields."""

    recipes: tuple[str, ...]
    seeds: int  # 1, 2, ... up to this
    output: Path
    config: Path = TINY
    start_checkpoint: Path | None = None
    tokens: int | None = None
    minutes: float | None = None
    overrides: tuple[str, ...] = ()

    def exhausted(self, rows: list[Row]) -> str | None:
        """Return the limit that the last step has reached: `tokens`, `minutes` or None."""
        last = next((row for row in reversed(rows) if row["kind"] == "step"), None)
        if last and self.tokens is not None and last["compute_tokens"] >= self.tokens:
            return "tokens"
        if last and self.minutes is not None and last["wall_seconds"] >= 60 * self.minutes:
            return "minutes"
        return None


@dataclass(frozen=True, slots=True)
class Run:
    """One recipe with one seed, and the arguments of its `megatron-rl train`."""

    config: RunConfig
    arguments: list[str]

    @property
    def name(self) -> str:
        """Name in tables and fits."""
        return f"{self.config.recipe}/seed-{self.config.seed}"

    def rows(self) -> list[Row]:
        """Read the rows of metrics.jsonl so far."""
        path = self.config.output_dir / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def ended_by(self) -> str | None:
        """Return `steps`, `tokens` or `minutes` for a finished run, else None."""
        done = self.config.output_dir / "done.json"
        return json.loads(done.read_text())["ended"] if done.exists() else None

    def execute(self, exhausted: Callable[[list[Row]], str | None]) -> None:
        """Train to the last step or until `exhausted`, from the newest checkpoint on.

        Raises:
            RunFailed: the process ended before that.
        """
        folder = self.config.output_dir
        resumes = any((folder / "checkpoints").glob("step_??????/trainer.json"))
        arguments = [*self.arguments, "--resume"] if resumes else self.arguments
        status = call(arguments, folder / "log.txt", lambda: exhausted(self.rows()) is not None)
        ended, steps = exhausted(self.rows()), last_rows(self.rows(), "step")
        if status == 0 and steps and steps[-1]["step"] + 1 >= self.config.schedule.steps:
            ended = "steps"
        if ended is None:
            raise RunFailed(f"{self.name} ended with status {status}: see {folder}/log.txt")
        (folder / "done.json").write_text(json.dumps({"ended": ended}) + "\n")


def call(arguments: list[str], log: Path, stop: Callable[[], bool] = lambda: False) -> int:
    """Run `megatron-rl` with its output in a log; return its exit status.

    It is interrupted, and writes a checkpoint, once `stop()` is true or the caller is interrupted.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.cli", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
    try:
        while process.poll() is None and not stop():
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def execute(ablation: Ablation, say: Callable[[str], None]) -> Iterator[Run]:
    """Execute the unfinished runs one after the other; yield each finished run, in order.

    A run that fails is left for the next call, and the others continue.

    Raises:
        ConfigError: a recipe or value that cannot run, or a folder of another ablation.
        RunFailed: after all others, if any failed.
    """
    start, runs = _plan(ablation)
    _record(ablation)
    if ablation.start_checkpoint is None and not (start / "model.safetensors").exists():
        log, folder = ablation.output / "start.log", str(ablation.output / "start")
        arguments = ["--config", str(ablation.config), *ablation.overrides, "--output_dir", folder]
        if status := call(["sft", *arguments], log):
            raise ConfigError(f"the supervised stage ended with status {status}: see {log}")
    failed = []
    for i, run in enumerate(runs, start=1):
        head, started = f"[{i}/{len(runs)}] {run.name}", time.monotonic()
        if run.ended_by() is None:
            say(f"{head}: running")
            try:
                run.execute(ablation.exhausted)
            except RunFailed as e:
                failed.append(str(e))
                say(f"{head}: {e}")
                continue
        say(f"{head}: ended by {run.ended_by()}, {time.monotonic() - started:.0f} s in this call")
        yield run
    if failed:
        raise RunFailed("; ".join(failed) + " (the same command tries again)")


def _plan(ablation: Ablation) -> tuple[Path, list[Run]]:
    """Return the start checkpoint, and the runs seed by seed.

    The problems and their split are those of the file's seed in all runs, so that none is evaluated
    on prompts that the start checkpoint has seen.
    """
    recipes, given = ablation.recipes, ablation.start_checkpoint
    if len(set(recipes)) != len(recipes) or not recipes:
        raise ConfigError(f"--recipes is {','.join(recipes)!r}: name each recipe once")
    file, shared = ablation.config, list(ablation.overrides)
    base = load_config(file, [*shared, *(["--start_checkpoint", str(given)] if given else [])])
    start = given or ablation.output / "start" / "start" / base.model
    shared += ["--start_checkpoint", str(start)]
    for task in base.tasks:
        shared += [f"--tasks.{task}.seed", str(base.seed_of(task))]
    runs = []
    for seed, recipe in product(range(1, ablation.seeds + 1), recipes):
        folder = str(ablation.output / recipe / f"seed-{seed}")
        arguments = [*shared, "--recipe", recipe, "--seed", str(seed), "--output_dir", folder]
        try:
            config = load_config(file, arguments)
        except ConfigError as e:
            raise ConfigError(f"recipe {recipe}: {e}") from None
        runs.append(Run(config, ["train", "--config", str(file), *arguments]))
    return start, runs


def _record(ablation: Ablation) -> None:
    """Write the settings into the folder; more recipes and seeds may join, nothing else may."""
    settings = {
        "config": ablation.config.read_text(),
        "start_checkpoint": str(ablation.start_checkpoint or ""),
        "tokens": ablation.tokens,
        "minutes": ablation.minutes,
        "overrides": list(ablation.overrides),
    }
    path = ablation.output / "ablation.json"
    before = json.loads(path.read_text()) if path.exists() else settings
    if changed := [key for key in settings if before.get(key) != settings[key]]:
        raise ConfigError(
            f"{path}: made with another {', '.join(changed)}; resume with the same, or choose"
            " another --output"
        )
    ablation.output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=2) + "\n")
