"""The runs of a study, one `megatron-rl train` after the other; their folders are its state."""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_rl.commands.recipes import differences
from megatron_rl.config import ConfigError, RunConfig, load_config
from megatron_rl.metrics.metrics_file import Row, last_rows, read_metrics

COMMAND = [sys.executable, "-m", "megatron_rl.cli"]
BUDGETS = {
    "tokens": ("compute_tokens", 1.0),
    "minutes": ("wall_seconds", 60.0),
    "device_hours": ("compute_device_hours", 1.0),
    "train_device_hours": ("compute_train_device_hours", 1.0),
}
"""Budget -> the value of a step's row that it limits, and how much of it is 1."""
FREE = {"resume", "output_dir", "timeouts", "checkpoint", "metrics"}
"""Keys that may differ when a run goes on: they do not change its results."""
POLL_SECONDS = 0.5
STOP_SECONDS = 120.0
_PR_SET_PDEATHSIG = 1


class RunFailed(RuntimeError):
    """A run that ended before its last step; the message names its log."""


@dataclass(frozen=True, slots=True)
class Run:
    """One point of an entry with one seed, and the arguments of its `megatron-rl train`."""

    group: str  # name that the runs of other seeds share
    turn: int  # position among the seeds and repeats of its group
    config: RunConfig
    arguments: list[str]
    supervised: list[str]  # arguments that make its start checkpoint, if it has none
    budget: dict[str, float]
    entry: dict[str, Any]  # in the study's file

    @property
    def name(self) -> str:
        """Name in tables and fits."""
        return f"{self.group}/{self.config.output_dir.name}"

    @property
    def gpu_hours(self) -> float | None:
        """Estimate for all steps, from the cost of a completion, or None without one."""
        cost, s = self.entry.get("gpu_hours_per_completion"), self.config.schedule
        return cost and s.steps * s.prompts_per_step * s.completions_per_prompt * cost

    def rows(self, kind: str = "step") -> list[Row]:
        """Return the rows of a kind in metrics.jsonl so far."""
        path = self.config.output_dir / "metrics.jsonl"
        return last_rows(read_metrics(path), kind) if path.exists() and path.stat().st_size else []

    def steps_done(self) -> int:
        """Return the optimizer steps in metrics.jsonl."""
        return max((row["step"] + 1 for row in self.rows()), default=0)

    def ended_by(self) -> str | None:
        """Return `steps` or the budget that ended the run, or None for an unfinished one."""
        path = self.config.output_dir / "summary.json"
        if path.exists() and not json.loads(path.read_text())["run"]["interrupted"]:
            return "steps"
        return self.exhausted()

    def exhausted(self) -> str | None:
        """Return the budget that the last step has reached, or None."""
        for row in self.rows()[-1:] if self.budget else ():
            for name, limit in self.budget.items():
                key, unit = BUDGETS[name]
                if row[key] >= limit * unit:
                    return name
        return None

    def check_folder(self) -> None:
        """Raise ConfigError if the folder has a run of other values."""
        path = self.config.output_dir / "config.yaml"
        old = load_config(path) if path.exists() else self.config
        values = (config.model_dump(mode="json", exclude=FREE) for config in (old, self.config))
        if changed := ", ".join(f"{k} {a} -> {b}" for k, a, b in differences(*values)):
            raise ConfigError(f"{path}: a run of other values ({changed}); choose another --output")

    def execute(self) -> None:
        """Train to the last step or a budget, from the newest checkpoint on.

        Raises:
            RunFailed: the process ended before that.
        """
        folder = self.config.output_dir
        with _locked(folder / "log.txt") as log:
            resumes = any((folder / "checkpoints").glob("step_??????/trainer.json"))
            arguments = [*self.arguments, "--resume"] if resumes else self.arguments
            status = call(arguments, log, lambda: self.exhausted() is not None)
        if self.ended_by() is None:
            raise RunFailed(f"{self.name} ended with status {status}: see {folder}/log.txt")


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Open a log for appending; its lock lives as long as a process that writes to it.

    Raises:
        RunFailed: another study, or a run that outlived its own, has not ended in time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        for _ in range(round(STOP_SECONDS / POLL_SECONDS)):
            with suppress(BlockingIOError):
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(POLL_SECONDS)
        else:
            raise RunFailed(f"{path}: another process still writes it; stop it")
        yield log


def call(arguments: list[str], log: IO[bytes], stop: Callable[[], bool] = lambda: False) -> int:
    """Run `megatron-rl` with its output in a log; return its exit status.

    It is interrupted, and writes a checkpoint, once `stop()` is true or the caller is interrupted
    or killed.
    """
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=log,
        stderr=subprocess.STDOUT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        start_new_session=True,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT),
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


def execute(runs: list[Run]) -> Iterator[Run]:
    """Execute the unfinished runs one after the other; yield each finished run, in order.

    A run that fails is left for the next call, and the others continue.

    Raises:
        ConfigError: a folder with a run of other values, no weights to start from, or a supervised
            stage that failed.
        RunFailed: after all others, if any failed.
    """
    from megatron_rl.models.start_checkpoint import start_directory

    for run in runs:
        run.check_folder()
        if not run.supervised:
            start_directory(run.config)
    failed = []
    for i, run in enumerate(runs, start=1):
        head, started = f"[{i}/{len(runs)}] {run.name}", time.monotonic()
        if run.ended_by() is None:
            start = run.config.start_checkpoint
            if run.supervised and not (start and (start / "model.safetensors").exists()):
                path = Path(run.supervised[-1]) / "log.txt"
                with _locked(path) as log:
                    if status := call(run.supervised, log):
                        problem = f"the supervised stage ended with status {status}: see {path}"
                        raise ConfigError(problem)
            print(f"{head}: running, from step {run.steps_done()}", flush=True)
            try:
                run.execute()
            except RunFailed as e:
                failed.append(str(e))
                print(f"{head}: {e}", flush=True)
                continue
        seconds = time.monotonic() - started
        print(f"{head}: ended by {run.ended_by()}, {seconds:.0f} s in this call", flush=True)
        yield run
    if failed:
        raise RunFailed("; ".join(failed) + " (the same command tries again)")
