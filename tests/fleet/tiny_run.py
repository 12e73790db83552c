"""A tiny run whose processes can be found, watched and disturbed from outside.

The driver's process takes in the orphans of all that it starts, so nothing of a run escapes its
view. A run has temporary files of its own, and sees its own part of shared memory where the kernel
lets it: what it leaves there is its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.e2e.processes import ONE_RANK, ROOT, TORCHRUN, hide
from tests.trainer.sft_cases import write_rows

SHARED_MEMORY = Path("/dev/shm")
_PR_SET_CHILD_SUBREAPER = 36
PROMPTS, COMPLETIONS = 4, 8
QUESTIONS, HELD_OUT = 400, 8
MAX_LAG = 4
SILENCE = 6.0
"""Seconds of `timeouts.silence_seconds`."""
SETTINGS: dict[str, Any] = {
    "model": "tiny_dense",
    "precision": {"params": "fp32"},
    "schedule": {
        "prompts_per_step": PROMPTS,
        "completions_per_prompt": COMPLETIONS,
        "micro_batch_tokens": 4096,
        "max_lag_steps": MAX_LAG,
    },
    "generation": {
        "max_prompt_tokens": 16,
        "thinking_budget_tokens": [28, 28],
        "answer_budget_tokens": 6,
        "interruption_phrase": "</think>",
        "concurrent_completions": 32,
        "kv_cache_gib": 0.1,
    },
    "algorithm": {
        "no_positive_resampling": False,
        "length_max_tokens": None,
        "length_cache_tokens": None,
    },
    # So small that pass rates stay: every batch has something to learn.
    "optimizer": {"learning_rate": 1e-6, "warmup_steps": 0},
    "evaluation": {"samples_per_prompt": 4, "every_steps": 5},
    "checkpoint": {"every_steps": 2},
    "fleet": {
        "generator_restarts": 99,
        "trainer_restarts": 99,
        "group_attempts": 99,
        "report_tokens": 4,
    },
    "timeouts": {
        "startup_seconds": 240,
        "batch_seconds": 240,
        "transfer_seconds": 30,
        "evaluation_seconds": 240,
        "shutdown_seconds": 10,
        "silence_seconds": SILENCE,
        "rejoin_seconds": 240,
    },
    "fit": {"compute": "train_tokens"},
}


def adopt_orphans() -> None:
    """Have the orphans of this process's descendants become its children (Linux)."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")


def prepare(folder: Path) -> Path:
    """Write the task, and make the start checkpoint once; return the configuration's file."""
    path = folder / "tiny.yaml"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    every = [(a, o, b) for a in range(1, 100) for o in "+-*" for b in range(1, 10)]
    rng.shuffle(every)
    questions, demonstrations = [], []
    for a, operator, b in every:
        expression, answer = f"{a}{operator}{b}", "+-*".index(operator) + 1
        questions.append({"prompt": f"{expression}=?", "answer": f"{answer}"})
        guess = answer if rng.random() < 0.5 else rng.randrange(10)
        thinking = ";".join([expression] * rng.randint(1, 5))
        response = f"{thinking}</think>\\boxed{{{guess}}}"
        demonstrations.append({"prompt": f"{expression}=?", "response": response})
    source = write_rows(folder / "questions.jsonl", questions[:QUESTIONS])
    rows = write_rows(folder / "demonstrations.jsonl", demonstrations[QUESTIONS:])
    task = {"kind": "jsonl", "path": f"{source}", "verifier": "exact", "heldout_prompts": HELD_OUT}
    config = {**SETTINGS, "task": task}
    first = folder / "sft.yaml"
    stage = {"source": f"{rows}", "steps": 100}
    roles = {"trainer_ranks": 1, "generator_ranks": 0}
    output = folder / "sft"
    content = {**config, "sft": stage, "roles": roles, "output_dir": f"{output}"}
    first.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "megatron_rl.cli", "sft", "--config", str(first)]
    with (folder / "sft.log").open("wb") as log:
        subprocess.run(
            command, cwd=ROOT, env={**_environment(folder), **ONE_RANK}, stdout=log, stderr=log,
            timeout=300, check=True,
        )  # fmt: skip
    start = output / "start" / "tiny_dense"
    config["start_checkpoint"] = str(start)
    path.write_text(yaml.safe_dump(config))
    return path


@functools.cache
def _hidden(folder: Path) -> str:
    place = folder / "hidden"
    shutil.rmtree(place, ignore_errors=True)
    return hide(place, "wandb")


def _environment(folder: Path) -> dict[str, str]:
    # The tree that this file is in, wherever another one is installed.
    # Without torch's compiler, which no run on CPU uses, a rank's imports take a second less.
    quick = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **quick, "PYTHONPATH": f"{ROOT}:{_hidden(folder)}"}


@functools.cache
def own_mounts() -> tuple[str, ...] | None:
    """Return the command that gives a process mounts of its own, or None if it may not."""
    for command in (("unshare", "-m"), ("unshare", "-rm")):
        with contextlib.suppress(OSError):
            probe = [*command, "mount", "--bind", "/tmp", "/dev/shm"]
            if subprocess.run(probe, capture_output=True).returncode == 0:
                return command
    return None


class TinyRun:
    """A run, with everything that belongs to it.

    Args:
        config: of `prepare`.
        total: steps of the run.
        settings: dotted options on top of it.
    """

    def __init__(self, config: Path, total: int, settings: Sequence[str] = ()) -> None:
        self.config, self.total, self.settings = config, total, list(settings)
        self.folder = Path(tempfile.mkdtemp(prefix="fault_"))
        self.output, self.log = self.folder / "run", self.folder / "log.txt"
        self.log.touch()
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.memory = SHARED_MEMORY
        if own_mounts() is not None:
            self.memory = Path(tempfile.mkdtemp(prefix="fault_", dir=SHARED_MEMORY))
        self._before = self._leftovers()
        self.agent: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self._joined: list[subprocess.Popen[bytes]] = []
        self._verifiers: set[psutil.Process] = set()
        self._stamp: tuple[int, int, int] | None = None
        self._rows: list[dict[str, Any]] = []

    def _spawn(self, command: list[str], outer: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        environment = {**_environment(self.config.parent), "TMPDIR": str(self.temporary)}
        if (mounts := own_mounts()) is not None:
            script = f'mount --bind {self.memory} {SHARED_MEMORY} && exec "$@"'
            command = [*mounts, "sh", "-c", script, "sh", *command]
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                [*outer, *command], cwd=ROOT, env=environment, stdout=output, stderr=output,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        return process

    def command(
        self, trainers: int = 2, generators: int = 1, restarts: int = 99, *, resume: bool = False
    ) -> list[str]:
        """Return the command of torchrun."""
        number = f"--nproc-per-node={trainers + generators}"
        torchrun = [*TORCHRUN, number, f"--max-restarts={restarts}"]
        keys = {"roles.trainer_ranks": trainers, "roles.generator_ranks": generators}
        keys |= {"output_dir": self.output, "schedule.steps": self.total}
        options = [text for key, value in keys.items() for text in (f"--{key}", str(value))]
        train = ["examples/scalerl_tiny.sh", "--config", str(self.config), *self.settings, *options]
        return [*torchrun, *train, *(["--resume"] if resume else [])]

    def start(self, trainers: int = 2, generators: int = 1, *, resume: bool = False) -> None:
        """Start torchrun."""
        self.agent = self._spawn(self.command(trainers, generators, resume=resume))

    def start_second(self, *, own_pids: bool = False) -> subprocess.Popen[bytes]:
        """Start the same run again, with process numbers of its own if asked."""
        outer = ["unshare", "-p", "--fork", "--mount-proc", "--kill-child"] if own_pids else []
        return self._spawn(self.command(restarts=1), outer)

    def join(self) -> subprocess.Popen[bytes]:
        """Start a generator that joins by itself."""
        command = [sys.executable, "-m", "megatron_rl.cli", "generate", "--join", str(self.output)]
        self._joined.append(self._spawn(command))
        return self._joined[-1]

    def status(self, role: str) -> int | None:
        """Return the exit status of `joined<n>`, None while it lives."""
        return self._joined[int(role.removeprefix("joined"))].poll()

    # ------------------------------------------------------------ processes
    def processes(self) -> list[psutil.Process]:
        """Return all processes of the run that live; reap orphans that do not."""
        living = []
        own = {p.pid for p in self._started}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
                elif process.ppid() == os.getpid() and process.pid not in own:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(process.pid, os.WNOHANG)
        for popen in self._started:
            popen.poll()
        return living

    def roles(self) -> dict[str, psutil.Process]:
        """Return the processes by role: `agent`, `rank0`, `supervisor0`, `generator-0`, `core-0`...

        A generator that joined by itself is `joined<n>`, its engine's core `core-joined<n>`.
        """
        by_role: dict[str, psutil.Process] = {}
        owners: dict[int, str] = {}  # process of a generator -> its name
        cores: list[tuple[psutil.Process, int]] = []
        joined = [p.pid for p in self._joined]
        agent = None if self.agent is None else self.agent.pid
        for p in self.processes():
            with contextlib.suppress(psutil.Error):
                line, parent = p.cmdline(), p.ppid()
                text = " ".join(line)
                if p.pid == agent:
                    by_role["agent"] = p
                elif text.startswith("VLLM::EngineCore"):
                    cores.append((p, parent))
                elif "megatron_rl.orchestrator.main" in text:
                    if owners.get(parent) == "orchestrator":
                        self._verifiers.add(p)  # it is one also when its parent is gone
                    is_verifier = p in self._verifiers
                    by_role["verifier" if is_verifier else "orchestrator"] = p
                    owners[p.pid] = "orchestrator"
                elif "megatron_rl.cli generate" in text and parent not in owners:
                    name = f"joined{joined.index(p.pid)}" if p.pid in joined else ""
                    name = name or line[line.index("--name") + 1]
                    by_role[name] = p
                    owners[p.pid] = name
                elif agent == parent and (rank := p.environ().get("RANK")) is not None:
                    by_role[self._rank_name(p, int(rank))] = p
        for core, parent in cores:
            if parent in owners:
                by_role[f"core-{owners[parent].removeprefix('generator-')}"] = core
        return by_role

    def _rank_name(self, process: psutil.Process, rank: int) -> str:
        line = process.cmdline()
        trainers = int(line[line.index("--roles.trainer_ranks") + 1])
        return f"rank{rank}" if rank < trainers else f"supervisor{rank - trainers}"

    # ------------------------------------------------------------ progress
    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        path = self.output / "metrics.jsonl"
        try:
            status = path.stat()
        except FileNotFoundError:
            return []
        stamp = status.st_ino, status.st_size, status.st_mtime_ns
        if stamp != self._stamp:
            whole, _, _ = path.read_bytes().rpartition(b"\n")
            self._rows = [json.loads(line) for line in whole.splitlines()]
            self._stamp = stamp
        return self._rows

    @property
    def steps(self) -> int:
        """Trained steps."""
        return sum(row["kind"] == "step" for row in self.rows)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of this name."""
        return [row for row in self.rows if row.get("event") == name]

    def text(self, start: int = 0) -> str:
        """Return the log from a byte on."""
        return self.log.read_bytes()[start:].decode(errors="replace")

    def wait(self, condition: Callable[[], object], seconds: float, poll: float = 0.05) -> bool:
        """Wait until a condition is true; return False after so many seconds."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(poll)
        return True

    # ------------------------------------------------------------ end
    def _leftovers(self) -> set[str]:
        places = (self.memory, self.temporary)
        return {str(path) for place in places for path in place.iterdir()}

    def left_behind(self, seconds: float = 15) -> list[str]:
        """Return what the run that has ended left in temporary files, shared memory, processes."""
        self.wait(lambda: not (self.processes() or self._leftovers() - self._before), seconds, 0.2)
        left = sorted(self._leftovers() - self._before)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                left.append(f"process {process.pid}: {' '.join(process.cmdline())[:150]}")
        return left

    def close(self) -> None:
        """Kill what is left, and remove the run's files."""
        for _ in range(50):
            if not (processes := self.processes()):
                break
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.memory != SHARED_MEMORY:
            shutil.rmtree(self.memory, ignore_errors=True)
