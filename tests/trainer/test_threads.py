"""`roles.trainer_threads` is of the trainer's ranks alone, and the own kernels run on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import RunConfig
from tests.workers import TORCH, run_script

TRAINER = """
import json, os, torch
from megatron_rl import train
from megatron_rl.config import RunConfig
from megatron_rl.kernels import library
from megatron_rl.trainer import world

os.environ.pop("OMP_NUM_THREADS", None)
if ENVIRONMENT:
    os.environ["OMP_NUM_THREADS"] = ENVIRONMENT

def stop(*_):
    raise EOFError  # the rank's threads are set; it has made no group yet

def threads():
    return len(os.listdir("/proc/self/task"))

world.init_world = stop
roles = {"trainer_threads": KEY}
try:
    train.run_trainer_rank(RunConfig.model_validate({"roles": roles}), 0, None, reinforce=False)
except EOFError:
    pass
assert library.load().path is not None, "the library must build where these tests run"
logits, targets = torch.ones(64, 8), torch.zeros(64, dtype=torch.int64)  # torch runs no threads
before = threads()
torch.ops.megatron_rl.row_stats(logits, targets, 0, 8, 1.0)
print("seen", json.dumps([torch.get_num_threads(), 1 + threads() - before]))
"""
GENERATOR = """
import json, os, sys
from megatron_rl import launch
from megatron_rl.config import RunConfig

config = RunConfig.model_validate({"roles": {"trainer_threads": 3}})
kept = []
launch.supervise = lambda config, rank, store, python, environment: kept.append(environment)
launch.run_generator_rank(config, 2, None)
os.environ.clear()
os.environ.update(kept[0])
from megatron_rl.generator.process_environment import prepare_environment
import torch

prepare_environment(config, "")
print("seen", json.dumps([torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]]))
"""


def seen(code: str, folder: Path) -> Any:
    status, output = run_script(code, folder, TORCH)
    assert status == 0, output
    (line,) = (line for line in output.splitlines() if line.startswith("seen "))
    return json.loads(line.removeprefix("seen "))


@pytest.mark.parametrize(
    ("key", "environment", "threads"), [(3, "1", 3), (None, "2", 2), (None, "", 1)]
)
def test_a_trainer_rank_and_its_kernels_have_these_threads(
    tmp_path: Path, key: int | None, environment: str, threads: int
) -> None:
    code = TRAINER.replace("KEY", repr(key)).replace("ENVIRONMENT", repr(environment))
    assert seen(code, tmp_path) == [threads, threads]


def test_an_engine_keeps_its_own(tmp_path: Path) -> None:
    assert seen(GENERATOR, tmp_path) == [1, "1"]


@pytest.mark.parametrize("threads", [0, -1])
def test_a_number_that_is_not_positive_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match=r"roles\.trainer_threads"):
        RunConfig.model_validate({"roles": {"trainer_threads": threads}})
