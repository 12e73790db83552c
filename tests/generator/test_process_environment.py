"""The GPUs and the start method of a generator's processes, where NVML counts 4 GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.config import RunConfig
from megatron_rl.generator.process_environment import prepare_environment

UUIDS = ["GPU-aa", "GPU-bb", "GPU-cc", "GPU-dd"]

FORK = """
import os, sys, torch

def forked_is_bad():
    child = os.fork()
    if not child:
        os._exit(torch.cuda._is_in_bad_fork())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

torch.cuda._raw_device_count_nvml = lambda: 4
from megatron_rl.config import RunConfig
from megatron_rl.generator.process_environment import prepare_environment

roles = {"generator_ranks": 2, "generator_tensor_parallel": 2}
prepare_environment(RunConfig.model_validate({"roles": roles}), "")
import megatron_rl.generator.engine
from vllm.utils.system_utils import get_mp_context

print(forked_is_bad(), get_mp_context().get_start_method(), os.environ["CUDA_VISIBLE_DEVICES"])
torch._C._cuda_getDeviceCount()
print(forked_is_bad())
"""


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not torch.cuda._is_compiled():
        pytest.skip("this PyTorch is built without CUDA")
    before = dict(os.environ)
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "VLLM_WORKER_MULTIPROC_METHOD"):
        os.environ.pop(name, None)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 4)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: UUIDS)
    yield
    os.environ.clear()
    os.environ.update(before)


def run_of(*, width: int = 1, one_gpu: bool = False) -> RunConfig:
    roles = {"generator_ranks": width, "generator_tensor_parallel": width}
    if one_gpu:
        roles |= {"trainer_ranks": 1, "one_gpu": True}
    return RunConfig.model_validate({"roles": roles})


def test_the_generator_leaves_cuda_alone_and_its_engine_is_spawned():
    pytest.importorskip("vllm")
    environment = {k: v for k, v in os.environ.items() if k != "PYTORCH_NVML_BASED_CUDA_CHECK"}
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        cwd=Path(__file__).parents[2],
        env=environment | {"LOCAL_RANK": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    # The last line: a process that has called CUDA, to show that the first would tell.
    assert done.stdout.splitlines()[-2:] == ["0 spawn 2,3", "1"], done.stderr[-3000:]


@pytest.mark.parametrize(
    ("visible", "local_rank", "width", "one_gpu", "chosen"),
    [
        (None, "3", 1, False, "3"),
        (None, "2", 2, False, "2,3"),
        (None, None, 2, False, "0,1"),
        (None, "1", 1, True, "0"),
        ("3,1", "1", 1, False, "1"),
        ("3", "1", 1, True, "3"),
        ("GPU-bb,GPU-dd", "1", 1, False, "GPU-dd"),
        ("MIG-x,MIG-y", "1", 1, False, "MIG-y"),
        ("", "1", 1, False, ""),
    ],
)
def test_an_engine_takes_the_gpus_of_its_own_ranks(visible, local_rank, width, one_gpu, chosen):
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    if local_rank is not None:
        os.environ["LOCAL_RANK"] = local_rank
    prepare_environment(run_of(width=width, one_gpu=one_gpu), "")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen


@pytest.mark.parametrize(
    ("visible", "task", "width", "chosen"),
    [
        (None, "3", 1, "3"),
        (None, "1", 2, "2,3"),
        ("2", "3", 1, "2"),  # SLURM shows each task its own GPUs only
        ("2,3", "1", 2, "2,3"),
    ],
)
def test_an_engine_that_slurm_started_takes_the_gpus_of_its_task(visible, task, width, chosen):
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    os.environ["SLURM_LOCALID"] = task
    prepare_environment(run_of(width=width), "")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen


@pytest.mark.parametrize(
    ("visible", "local_rank", "width", "message"),
    [
        (None, "3", 2, r"local rank 3 with .*tensor_parallel = 2 needs 5 GPUs .* 4 are visible"),
        (None, "4", 1, r"local rank 4 with .*tensor_parallel = 1 needs 5 GPUs .* 4 are visible"),
        ("0,9", "1", 1, r"needs 2 GPUs on its node, and 1 are visible \(0\)"),
        ("GPU-bb,GPU-ee", "1", 1, r"needs 2 GPUs on its node, and 1 are visible \(GPU-bb\)"),
    ],
)
def test_gpus_that_do_not_exist_are_named(visible, local_rank, width, message):
    os.environ["LOCAL_RANK"] = local_rank
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    with pytest.raises(ValueError, match=message):
        prepare_environment(run_of(width=width), "")


def test_forked_workers_are_refused_on_gpus():
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    with pytest.raises(ValueError, match="VLLM_WORKER_MULTIPROC_METHOD is 'fork'.*unset it"):
        prepare_environment(run_of(), "")
