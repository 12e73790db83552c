"""Checkpoints of four ranks: their memory, other layouts, Megatron's own files, a slow disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.commands.plan.nodes import checkpoint_bytes
from megatron_rl.commands.plan.tensors import count_stages
from megatron_rl.compat import megatron_checkpoint
from megatron_rl.models import architecture
from megatron_rl.models.safetensors_directory import read_config
from tests.trainer.cases import run_config, write_model
from tests.trainer.checkpoint_worker import CHAINS, RANKS, VOCABULARY
from tests.workers import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
CHANGES = {"vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 4}
SMALL = 2**18
"""Bytes that do not grow with the tensors: names, ranges and sizes of the shards of all ranks."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank saw."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in CHAINS:
        write_model(folder / name, name, 0.2, **CHANGES)
    run_ranks("tests.trainer.checkpoint_worker", RANKS, folder, seconds=350)
    return [torch.load(folder / f"seen{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", CHAINS)
def test_a_rank_needs_memory_for_its_own_shard_and_one_tensor(seen: Any, name: str) -> None:
    for rank in range(RANKS):
        for layout, memory in zip(CHAINS[name], seen[rank][name]["memory"], strict=True):
            most = sum(memory["own"]) + SMALL
            assert 0 < memory["save"] <= most, (rank, layout)
            assert memory.get("load", 0) <= most, (rank, layout)


@pytest.mark.parametrize("name", CHAINS)
def test_the_plan_counts_what_a_rank_keeps_on_its_host(
    seen: Any, name: str, tmp_path: Path
) -> None:
    model = architecture(read_config(write_model(tmp_path, name, **CHANGES)))
    for rank in range(RANKS):
        for layout, memory in zip(CHAINS[name], seen[rank][name]["memory"], strict=True):
            run = run_config(name, RANKS, **layout)
            planned = checkpoint_bytes(run, count_stages(model, run.parallel), rank)
            assert memory["kept"] == pytest.approx(planned, rel=0.01), (rank, layout)


@pytest.mark.parametrize("name", CHAINS)
def test_weights_and_optimizer_pass_through_every_layout_exactly(seen: Any, name: str) -> None:
    assert seen[0][name]["differing"] == [[] for _ in CHAINS[name]]
    before, after = seen[0][name]["next"]  # the step after the first layout, and after the last
    assert before.keys() == after.keys()
    assert all(before[n].equal(after[n]) for n in before)


def test_files_are_interchangeable_with_megatrons_own(seen: Any) -> None:
    assert seen[0]["upstream"] == {name: [[], []] for name in CHAINS}


def test_nothing_that_nccl_would_time_waits_for_a_slow_disk(seen: Any) -> None:
    for rank in range(1, RANKS):
        assert len(seen[rank]["timed"]) > 3
        assert not any(seen[rank]["timed"]), rank


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (1, 6), (5, 1), (2, 1, 3)])
def test_every_range_of_a_tensor_is_its_boxes_in_order(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(tensor.numel() + 1):
        for stop in range(start, tensor.numel() + 1):
            elements: list[int] = []
            boxes = list(megatron_checkpoint.rectangles(shape, start, stop))
            for offset, size in boxes:
                box = tensor[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
                assert box.shape == size
                elements += box.flatten().tolist()
            assert elements == list(range(start, stop))
            assert len(boxes) <= 2 * len(shape) - 1
