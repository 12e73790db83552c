"""The runs of an ablation: what they are, which are over, and one after the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_rl.config import ConfigError, RunConfig, load_config
from megatron_rl.metrics.metrics_file import Row, last_rows, read_metrics

FORMAT = 1
TINY = Path(__file__).with_name("tiny.yaml")
POLL_SECONDS = 0.5
STOP_SECONDS = 120.0
Ended = Literal["steps", "tokens", "minutes"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Where a run ends, if its steps do not end before; None is no bound."""

    tokens: int | None = None
    """Tokens generated for training."""
    minutes: float | None = None
    """Minutes of the RL stage, over all resumptions; start-up is not counted."""

    def reached(self, rows: list[Row]) -> Ended | None:
        """Which bound the last step of these rows has reached, if any."""
        last = next((row for row in reversed(rows) if row["kind"] == "step"), None)
        if last is None:
            return None
        if self.tokens is not None and last["compute_tokens"] >= self.tokens:
            return "tokens"
        if self.minutes is not None and last["wall_seconds"] >= 60 * self.minutes:
            return "minutes"
        return None


@dataclass(frozen=True, slots=True)
class Plan:
    """An ablation: every recipe with every seed.

    Example: `Plan(recipes=("scalerl", "grpo"), seeds=2, output=Path("runs/ablation"))` is 4 runs.
    """

    recipes: tuple[str, ...]
    seeds: int
    output: Path
    config: Path = TINY
    start_checkpoint: Path | None = None
    """Hugging Face directory that all runs start from; None makes one."""
    budget: Budget = Budget()
    overrides: tuple[str, ...] = ()

    def runs(self) -> list[Run]:
        """All runs, seed by seed: a half-finished ablation compares all recipes at equal seeds."""
        return [
            Run(self, recipe, seed) for seed in range(1, self.seeds + 1) for recipe in self.recipes
        ]

    def check(self) -> None:
        """Load every run's configuration, and refuse a folder of another ablation.

        Raises:
            ConfigError: a recipe or value that cannot run, fewer than one seed or two recipes, or
                a folder that holds something else.
        """
        if len(set(self.recipes)) != len(self.recipes) or not self.recipes:
            raise ConfigError(f"--recipes is {','.join(self.recipes)!r}: name each recipe once")
        if self.seeds < 1:
            raise ConfigError(f"--seeds is {self.seeds}: at least one run per recipe is needed")
        for run in self.runs():
            run.load()
        about = {"format": FORMAT, "config": self.config.read_text(), **self._identity()}
        mark = self.output / "ablation.json"
        if mark.exists():
            found = json.loads(mark.read_text())
            changed = [key for key in about if found.get(key) != about[key]]
            if changed:
                raise ConfigError(
                    f"{mark}: made with another {', '.join(changed)}; resume with the same, or"
                    " choose another --output"
                )
            return
        self.output.mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps(about, indent=2) + "\n")

    def _identity(self) -> dict[str, Any]:
        # More recipes or seeds may join later; what each run is made of may not change.
        return {
            "start_checkpoint": str(self.start_checkpoint or ""),
            "budget": asdict(self.budget),
            "overrides": list(self.overrides),
        }

    def start(self) -> Path:
        """The start checkpoint's directory; it may not exist yet."""
        return self.start_checkpoint or self.output / "start" / "start" / self._base().model

    def make_start(self) -> None:
        """Run the supervised stage, unless its checkpoint is there or was given.

        Raises:
            ConfigError: the stage failed; its log says why.
        """
        if self.start_checkpoint is not None or (self.start() / "model.safetensors").exists():
            return
        folder = self.output / "start"
        arguments = [
            "sft",
            "--config",
            str(self.config),
            *self.overrides,
            "--output_dir",
            str(folder),
        ]
        status = _Process(arguments, self.output / "start.log").wait(lambda: False)
        if status:
            raise ConfigError(
                f"the supervised stage ended with {status}: see {self.output}/start.log"
            )

    def _base(self) -> RunConfig:
        return load_config(self.config, list(self.overrides))


@dataclass(frozen=True, slots=True)
class Run:
    """One recipe with one seed."""

    plan: Plan
    recipe: str
    seed: int

    @property
    def name(self) -> str:
        """Name in tables and fits."""
        return f"{self.recipe}/seed-{self.seed}"

    @property
    def directory(self) -> Path:
        """Its output_dir."""
        return self.plan.output / self.recipe / f"seed-{self.seed}"

    def arguments(self) -> list[str]:
        """Arguments of `megatron-rl train` behind the configuration file.

        The seed is the run's; problems and their split are those of the configuration's own seed,
        so that no run is evaluated on prompts that the start checkpoint has seen.
        """
        base = self.plan._base()
        seeds = [part for t in base.tasks for part in (f"--tasks.{t}.seed", str(base.seed_of(t)))]
        return [
            *("--recipe", self.recipe, "--seed", str(self.seed)),
            *seeds,
            *("--output_dir", str(self.directory), *self.plan.overrides),
        ]

    def load(self) -> RunConfig:
        """Its configuration.

        Raises:
            ConfigError: it cannot run; the recipe is named.
        """
        try:
            return load_config(self.plan.config, self.arguments())
        except ConfigError as e:
            raise ConfigError(f"recipe {self.recipe}: {e}") from None

    def done(self) -> Ended | None:
        """How it ended, None as long as it has not."""
        mark = self.directory / "done.json"
        return json.loads(mark.read_text())["ended"] if mark.exists() else None

    def rows(self) -> list[Row]:
        """The rows of its metrics.jsonl so far."""
        path = self.directory / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def execute(self) -> Ended:
        """Run it to its end or its budget, going on from its newest checkpoint.

        Raises:
            RunFailed: it ended by itself before its last step.
        """
        config, budget = self.load(), self.plan.budget
        resume = any((self.directory / "checkpoints").glob("step_??????/trainer.json"))
        arguments = ["train", "--config", str(self.plan.config), *self.arguments()]
        arguments += ["--start_checkpoint", str(self.plan.start())]
        arguments += ["--resume"] if resume else []
        process = _Process(arguments, self.directory / "log.txt")
        status = process.wait(lambda: budget.reached(self.rows()) is not None)
        steps = last_rows(self.rows(), "step")
        ended: Ended | None = budget.reached(self.rows())
        if steps and steps[-1]["step"] + 1 >= config.schedule.steps and status == 0:
            ended = "steps"
        if ended is None:
            raise RunFailed(f"{self.name} ended with status {status}: see {self.directory}/log.txt")
        (self.directory / "done.json").write_text(json.dumps({"ended": ended}) + "\n")
        return ended


class RunFailed(RuntimeError):
    """A run did not get to its end; the message names its log."""


class _Process:
    """`megatron-rl` as a process of its own, with its output in a log."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ}
        environment.setdefault("OMP_NUM_THREADS", "1")
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.cli", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait(self, enough: Callable[[], bool]) -> int:
        """Its exit status; it is asked to stop, with a checkpoint, once `enough` says so."""
        try:
            while self._process.poll() is None:
                if enough():
                    self._stop()
                    break
                time.sleep(POLL_SECONDS)
        except BaseException:
            self._stop()
            raise
        return self._process.wait()

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def execute(plan: Plan, say: Callable[[str], None]) -> Iterator[Run]:
    """Run what is not over yet, one after the other; yields each run that is over, in order.

    A run that fails is told and left for the next call; the others go on.

    Raises:
        ConfigError: a plan that cannot run.
        RunFailed: after all others, if any failed.
    """
    plan.check()
    plan.make_start()
    runs, failed = plan.runs(), []
    for i, run in enumerate(runs, start=1):
        ended, head = run.done(), f"[{i}/{len(runs)}] {run.name}"
        if ended is None:
            say(f"{head}: running")
            started = time.monotonic()
            try:
                ended = run.execute()
            except RunFailed as e:
                failed.append(str(e))
                say(f"{head}: {e}")
                continue
            say(f"{head}: {_told(run, ended)} in {time.monotonic() - started:.0f} s")
        else:
            say(f"{head}: over before, {_told(run, ended)}")
        yield run
    if failed:
        raise RunFailed("; ".join(failed) + " (the same command tries again)")


def _told(run: Run, ended: Ended) -> str:
    steps, evaluations = (last_rows(run.rows(), kind) for kind in ("step", "eval"))
    rate = f"{evaluations[-1]['pass_rate']:.3f}" if evaluations else "none"
    tokens = steps[-1]["compute_tokens"] if steps else 0
    return (
        f"ended by its {ended} after {len(steps)} steps and {tokens:,.0f} tokens, pass rate {rate}"
    )
