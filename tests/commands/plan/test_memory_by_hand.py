"""The plans of the shipped examples against a count by hand, part by part.

The figures are arithmetic on the published config.json values: 8B has H 4096, F 14,336, 32 layers,
vocabulary 128,256; Scout H 5120, F 8192, 48 layers, 16 experts and a shared one, vocabulary
202,048.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.cli import main
from megatron_rl.commands.plan.host_memory import VERSIONS, held_by_senders
from megatron_rl.commands.plan.memory import GIB, LayoutMemory, estimate
from megatron_rl.commands.plan.tensors import update_bytes
from megatron_rl.commands.plan.update_memory import receiver_bytes, update_seconds
from megatron_rl.config import RunConfig, load_config
from megatron_rl.models import architecture, named_config

EXAMPLES = Path(__file__).parents[3] / "examples"
DEVICE = (
    "parameters", "gradients", "optimizer", "activations", "logits", "export", "staging",
    "communicators", "total",
)  # fmt: skip
GENERATOR = ("weights", "workspace", "kv_cache", "kv_bytes_per_sequence", "update")
HOST = ("versions", "saving", "processes", "total")

# GiB. Export: three copies of the largest bucket, which is the embedding (8B: 0.98) or gate and up
# of a layer's 16 experts (Scout: 2.5). Staging: twice the newest chunk and the one before it; the
# largest chunk of Scout is 126 MB of attention and those experts (2.617), after the embedding
# (1.927). Versions: three of 14.96, or of 200.74.
BY_HAND: dict[str, tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]] = {
    "scalerl_8b_node": (
        (7.479, 14.958, 22.437, 13.944, 3.603, 2.936, 2.691, 0.625, 65.737),
        (14.958, 4.023, 49.020, 2.010, 3.873),
        (44.873, 7.914, 64.0, 116.787),
    ),
    "scalerl_8b": (
        (14.958, 29.915, 5.609, 68.776, 3.603, 2.936, 2.691, 10.0, 135.552),
        (14.958, 4.061, 139.081, 2.010, 3.873),
        (44.873, 7.914, 40.0, 92.787),
    ),
    "scalerl_scout": (
        (16.440, 32.881, 75.286, 24.745, 3.726, 7.5, 7.162, 5.0, 165.240),
        (100.369, 4.084, 53.647, 0.939, 9.886),
        (602.211, 14.0, 40.0, 656.211),
    ),
}
SECONDS = {"scalerl_8b_node": 1.285, "scalerl_8b": 20.557, "scalerl_scout": 137.945}
SEQUENCES = {"scalerl_8b_node": 24.39, "scalerl_8b": 69.20, "scalerl_scout": 57.11}


def planned(name: str, **sections: dict[str, Any]) -> tuple[RunConfig, LayoutMemory]:
    """Return an example with other values, and its memory."""
    run = load_config(EXAMPLES / f"{name}.yaml")
    run = run.model_copy(
        update={k: getattr(run, k).model_copy(update=values) for k, values in sections.items()}
    )
    return run, estimate(run, architecture(named_config(run.model)))


@pytest.mark.parametrize("name", BY_HAND)
def test_every_part_of_the_shipped_examples_is_that_of_the_count_by_hand(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        main(["plan", str(EXAMPLES / f"{name}.yaml"), "--json", str(tmp_path / "plan.json")])
    output = capsys.readouterr().out
    assert e.value.code == 0 and "notes:" not in output
    plan = json.loads((tmp_path / "plan.json").read_text())
    of = plan["configured"]
    (stage,), generator, host = of["stages"], of["generator"], of["host"]
    for keys, part, by_hand in zip(
        (DEVICE, GENERATOR, HOST), (stage, generator, host), BY_HAND[name], strict=True
    ):
        counted = {key: part[key] / GIB for key in keys}
        assert counted == pytest.approx(dict(zip(keys, by_hand, strict=True)), rel=0.05)
    assert generator["sequences"] == pytest.approx(SEQUENCES[name], rel=0.05)
    assert plan["transfer"]["seconds"] == pytest.approx(SECONDS[name], rel=0.05)
    assert host["node"] == 0
    for part in (*(f"  {key} GiB" for key in DEVICE), "workspace", "an update", *HOST):
        assert part in output, part


def test_the_kubernetes_example_fits_its_gpus_and_its_pods(tmp_path: Path) -> None:
    text = (EXAMPLES / "cluster" / "kubernetes.yaml").read_text()
    (config,) = (d for d in yaml.safe_load_all(text) if d["kind"] == "ConfigMap")
    (tmp_path / "run.yaml").write_text(config["data"]["run.yaml"])
    run = load_config(tmp_path / "run.yaml")
    memory = estimate(run, architecture(named_config(run.model)))
    assert (memory.misfits, memory.notes) == ([], [])


def test_staging_does_not_grow_with_the_engines_but_time_and_communicators_do() -> None:
    few, less = planned("scalerl_scout", roles={"generator_ranks": 16})
    many, more = planned("scalerl_scout")
    assert (few.roles.engines, many.roles.engines) == (8, 32)
    assert less.worst.staging == more.worst.staging
    assert 4 * less.worst.communicators == more.worst.communicators
    a = architecture(named_config(many.model))
    assert 4 * update_seconds(few, a) == update_seconds(many, a)


def test_layers_of_chunked_attention_keep_their_last_chunk() -> None:
    run, memory = planned("scalerl_scout")
    # Every fourth layer of 48 keeps all tokens; 4 heads of 128, keys and values, bf16.
    tokens = 12 * run.sequence_tokens + 36 * 8192
    assert memory.generator.kv_bytes_per_sequence == 2 * 4 * 128 * 2 * tokens


def test_notes_name_preemption_and_time_outs_that_are_too_short() -> None:
    _, memory = planned(
        "scalerl_scout",
        generation={"concurrent_completions": 64},
        timeouts={"startup_seconds": 900.0, "transfer_seconds": 100.0},
    )
    preempts, transfer, start = memory.notes
    assert memory.misfits == []
    assert "holds 89% of generation.concurrent_completions = 64 at full length" in preempts
    assert "lower it to 57" in preempts
    assert "138 s" in transfer and "timeouts.transfer_seconds is 100" in transfer
    assert "20 nodes read 4.3 TB" in start and "about 1162 s" in start


def test_a_host_that_is_too_small_and_an_update_that_is_too_large_are_misfits() -> None:
    _, memory = planned(
        "scalerl_scout", roles={"host_gib": 512.0}, generation={"gpu_memory_fraction": 0.95}
    )
    update, host = memory.misfits
    assert "an update of the weights takes 9.9 GiB" in update and "= 0.95 leaves 9.3" in update
    assert "host of node 0: 656.2 GiB, but roles.host_gib is 512" in host
    assert "versions of the weights 602.2, saving 14.0, processes 40.0" in host
    shared = {"transport": "disk", "directory": Path("/shared/weights")}
    _, memory = planned("scalerl_scout", roles={"host_gib": 512.0}, weights=shared)
    assert memory.misfits == [] and memory.host.versions == 0
    assert memory.worst.staging == memory.worst.communicators == 0


def test_the_senders_hold_the_model_once_per_version_and_engines_keep_part_of_the_experts() -> None:
    sizes = {"trainer_ranks": 16, "generator_ranks": 8, "generator_tensor_parallel": 1}
    run, _ = planned("scalerl_8b", roles=sizes)
    a = architecture(named_config("qwen3-30b-a3b"))
    layout = {"pipeline": 2, "expert": 4, "tensor": 2, "sequence_parallel": True}
    run = run.model_copy(update={"parallel": run.parallel.model_copy(update=layout)})
    held = held_by_senders(run, a)
    # One rank per stage and expert group: experts have tensors of their own.
    assert list(held) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert sum(held.values()) == VERSIONS * update_bytes(run, a)
    # Until the last group has sent its part, vLLM keeps three quarters of a stage's experts.
    experts = 24 * 128 * 3 * 2048 * 768 * 2
    one = run.model_copy(update={"parallel": run.parallel.model_copy(update={"expert": 1})})
    more = receiver_bytes(run, a) - receiver_bytes(one, a)
    assert more == pytest.approx(0.75 * experts, rel=0.05)
    gloo = run.weights.model_copy(update={"transport": "gloo"})
    assert held_by_senders(run.model_copy(update={"weights": gloo}), a) == {
        0: VERSIONS * update_bytes(run, a)
    }


def test_one_gpu_is_divided_between_trainer_and_generator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["plan", str(EXAMPLES / "scalerl_one_gpu.yaml"), "--generation.gpu_memory_fraction"]
    for fraction, code in (("0.35", 0), ("0.75", 3)):
        with pytest.raises(SystemExit) as e:
            main([*command, fraction])
        assert e.value.code == code, fraction
    output = capsys.readouterr().out
    assert "fits 1 GPUs of 24 GiB" in output
    assert "of the generator)" in output and "; lower generation.gpu_memory_fraction" in output
    assert "roles.one_gpu allows no other layout" in output and "proposed:" not in output
