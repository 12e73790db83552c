"""One of two trainer ranks, from `run_trainer_rank` on; orchestrator and publisher are stand-ins.

Started by `test_checkpoint_resume.py`, which writes `case.json`. Rank 0 writes the steps that it
trained to `trained.json`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

RANKS = 2
LONG = 90.0
"""Seconds of a step that no test waits for."""


class Orchestrator:
    """The process and its client: hands out batches to the last step, with saves on the way."""

    endpoint = ""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.trained = case, list[int]()

    def next_batch(self, step: int) -> Any:
        from tests.trainer.cases import batch

        last = step == self.case["last"]
        return batch(step, seed=step, save=step in self.case["save_at"], stop=last)

    def step_done(self, done: Any, wait_seconds: float) -> None:
        self.trained.append(done.step)

    def save_state(self, step: int, directory: str) -> None:
        (Path(directory) / "state.msgpack").write_bytes(bytes(range(100)))

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def wait_for(path: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} was not written within {seconds} s"
        time.sleep(0.02)


def in_a_long_step(rank: int, folder: Path, failing: list[int]) -> None:
    """Have the checkpoint wait for `go`, and the step of these ranks fail then, of others last."""
    from megatron_rl.compat import megatron_checkpoint
    from megatron_rl.trainer.step import Trainer

    write = megatron_checkpoint.Save.write

    def late(save: Any) -> Any:
        wait_for(folder / "go")
        return write(save)

    train_step = Trainer.train_step

    def long(trainer: Any, batch: Any, step: int) -> Any:
        if not batch.save:
            return train_step(trainer, batch, step)
        (folder / f"in_step{rank}").write_text(str(os.getpid()))
        if rank in failing:
            raise RuntimeError("this step failed")
        time.sleep(LONG)
        raise AssertionError("the step came to its end")

    megatron_checkpoint.Save.write, Trainer.train_step = late, long


def main(rank: int, folder: Path) -> None:
    from megatron_rl import train
    from megatron_rl.orchestrator import child_process
    from megatron_rl.trainer import client, publisher
    from tests.trainer.cases import run_config

    case = json.loads((folder / "case.json").read_text())
    orchestrator = Orchestrator(case)
    for module, name in (
        (child_process, "OrchestratorProcess"),
        (client, "TrainerClient"),
        (client, "show_life"),
        (publisher, "Publisher"),
    ):
        setattr(module, name, lambda *_, **__: orchestrator)
    if "failing" in case:
        in_a_long_step(rank, folder, case["failing"])
    own = {"output_dir": folder / "out", "resume": case["resume"], "checkpoint__keep": 3}
    config = run_config(folder / "model", RANKS, metrics__max_logprob_error=1e6, **own)
    store = dist.FileStore(str(folder / case["store"]), RANKS)
    train.run_trainer_rank(config, rank, store, reinforce=True)
    if rank == 0:
        (folder / "trained.json").write_text(json.dumps(orchestrator.trained))
