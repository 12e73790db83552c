"""Trainer and generator on one GPU: the trainer's part of its memory, and the order of their start.

Not exercised: a GPU. vLLM takes memory that another process allocates during its start for its own
(`memory_profiling` in vllm/utils/mem_utils.py), so the trainer's model comes first.
"""

from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch

from megatron_rl import train
from megatron_rl.config import ConfigError, RunConfig

ROLES = {"one_gpu": True, "trainer_ranks": 1}


class Ended(Exception):
    """Raised in place of the rest of the run."""


@pytest.fixture
def share(monkeypatch):
    """Return a function from settings to the trainer's fraction of a GPU of 40 GiB."""
    from megatron_rl.trainer import world

    limit = create_autospec(torch.cuda.set_per_process_memory_fraction)
    properties = SimpleNamespace(total_memory=40 * 2**30)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": create_autospec(torch.cuda.set_device),
        "get_device_properties": lambda device: properties,
        "set_per_process_memory_fraction": limit,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def init_process_group(*_, **__):
        raise Ended

    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    monkeypatch.setenv("LOCAL_RANK", "0")

    def of(**settings):
        with pytest.raises(Ended):
            world.init_world(RunConfig(**settings), 0, 1, torch.distributed.HashStore())
        return limit.call_args

    return of


def test_the_trainer_is_limited_to_what_the_generator_leaves(share):
    fraction, device = share(roles=ROLES, generation={"gpu_memory_fraction": 0.25}).args
    assert fraction == pytest.approx(0.75 - 2 / 40)
    assert device == 0


def test_a_trainer_with_a_gpu_of_its_own_has_no_limit(share):
    assert share(roles={"trainer_ranks": 1}) is None


def test_a_generator_that_leaves_nothing_is_refused(share):
    with pytest.raises(ConfigError, match=r"gpu_memory_fraction is 0\.96.*40\.0 GiB.*lower it"):
        share(roles=ROLES, generation={"gpu_memory_fraction": 0.96})


@pytest.mark.parametrize(("one_gpu", "started"), [(True, False), (False, True)])
def test_the_engine_starts_after_the_trainers_model_where_they_share_a_gpu(
    tmp_path, monkeypatch, one_gpu, started
):
    from megatron_rl.orchestrator import child_process
    from megatron_rl.trainer import checkpoint_folder, client, model

    store, keys = {}, []

    class Orchestrator:
        endpoint = "tcp://127.0.0.1:1"
        ended = None

        def __init__(self, *_):
            pass

        def kill_on_error(self, *_):
            pass

    def policy(*_):
        keys.append(set(store))
        return SimpleNamespace(architecture=SimpleNamespace(active_parameters=lambda: 1))

    def connect(*_, **__):
        keys.append(set(store))
        raise Ended

    monkeypatch.setattr(child_process, "OrchestratorProcess", Orchestrator)
    monkeypatch.setattr(checkpoint_folder, "resume_from", lambda *_: None)
    monkeypatch.setattr(model, "Policy", policy)
    monkeypatch.setattr(client, "TrainerClient", connect)
    config = RunConfig(output_dir=tmp_path, roles={"one_gpu": one_gpu, "trainer_ranks": 1})
    with pytest.raises(Ended):
        train._reinforce(
            config, 0, SimpleNamespace(set=store.__setitem__), tmp_path, {}, lambda: False
        )
    address = {"orchestrator"}  # the supervisor of an engine waits for it
    assert keys == [address if started else set(), address]


def test_the_two_ranks_count_as_one_device():
    assert RunConfig(roles=ROLES).roles.devices == 1
    assert RunConfig().roles.devices == 3
