"""Start one rank per GPU, or name the number of nodes that a run needs."""

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.launch import torchrun_for

ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def start(needed, environment, gpus, per_node=8, **options):
    return torchrun_for(needed, "run.yaml", per_node, environment, gpus, **options)


def test_outside_torchrun_a_node_starts_the_needed_ranks():
    for needed, environment, gpus in ((3, {}, 0), (8, {}, 8), (3, ONE, 0), (4, ONE, 8)):
        options = ["--standalone", f"--nproc-per-node={needed}"]
        assert start(needed, environment, gpus) == options


@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("environment", [{}, ONE])
def test_two_roles_on_one_gpu_are_two_ranks(gpus, environment):
    assert start(2, environment, gpus, one_gpu=True) == ["--standalone", "--nproc-per-node=2"]
    assert start(2, {**ONE, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, gpus, one_gpu=True) is None


def test_running_ranks_start_nothing():
    assert start(1, ONE, 1) is None
    several = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    assert start(8, several, 8) is None
    assert start(80, several, 8) is None  # `check_world_size` rejects the number


def test_one_rank_on_each_of_several_nodes_starts_every_nodes_gpus():
    environment = {
        "RANK": "7",
        "WORLD_SIZE": "20",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "7",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "29500",
    }
    assert start(80, environment, 4) == [
        "--nnodes=20",
        "--node-rank=7",
        "--master-addr=head",
        "--master-port=29501",
        "--nproc-per-node=4",
    ]
    assert start(80, environment, 0) is None


def test_too_few_gpus_are_rejected_with_the_number_of_nodes():
    with pytest.raises(
        ConfigError, match=r"run.yaml needs 80 ranks.*1 node\(s\) of 8 GPU\(s\) have 8.*--nnodes 10"
    ):
        start(80, ONE, 8)
    with pytest.raises(ConfigError, match=r"this node has no GPU: without GPUs a node starts 8"):
        start(80, {}, 0)
