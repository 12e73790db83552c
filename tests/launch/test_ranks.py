"""How a command starts itself anew: one rank per GPU, or told how many nodes it takes."""

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.launch import Torchrun, torchrun_for

ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def ask(needed, environment, gpus, per_node=8):
    return torchrun_for(needed, "run.yaml", per_node, environment, gpus)


def test_outside_torchrun_a_node_starts_the_ranks_that_are_needed():
    assert ask(3, {}, 0) == Torchrun(1, 3)
    assert ask(8, {}, 8) == Torchrun(1, 8)
    assert ask(3, ONE, 0) == Torchrun(1, 3)
    assert ask(4, ONE, 8) == Torchrun(1, 4)
    assert Torchrun(1, 4).options() == ["--standalone", "--nproc-per-node=4"]


def test_ranks_that_are_there_start_nothing():
    assert ask(1, ONE, 1) is None
    several = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    assert ask(8, several, 8) is None
    assert ask(80, several, 8) is None  # the number is wrong: whoever asked says so


def test_one_rank_on_each_of_several_nodes_starts_every_nodes_gpus():
    environment = {
        "RANK": "7",
        "WORLD_SIZE": "20",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "7",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "29500",
    }
    found = ask(80, environment, 4)
    assert found == Torchrun(20, 4, 7, ("head", 29501))
    assert found.options() == [
        *("--nnodes=20", "--node-rank=7", "--master-addr=head", "--master-port=29501"),
        "--nproc-per-node=4",
    ]
    assert ask(80, environment, 0) is None


def test_a_world_that_is_too_small_is_told_what_it_takes():
    with pytest.raises(
        ConfigError, match=r"run.yaml needs 80 ranks.*1 node\(s\) of 8 GPU\(s\) have 8.*--nnodes 10"
    ):
        ask(80, ONE, 8)
    with pytest.raises(ConfigError, match=r"this node has no GPU: without GPUs a node starts 8"):
        ask(80, {}, 0)
