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
import torch
import yaml

from megatron_rl.cli import main
from megatron_rl.commands.plan.memory import LayoutMemory, estimate
from megatron_rl.commands.plan.nodes import GIB, nodes_of, share_bytes, update_time
from megatron_rl.commands.plan.tensors import stage_parts, update_bytes
from megatron_rl.config import RunConfig, load_config
from megatron_rl.models import architecture, named_config

EXAMPLES = Path(__file__).parents[3] / "examples"
DEVICE = (
    "parameters", "gradients", "optimizer", "activations", "logits", "export", "difference", "total"
)  # fmt: skip
GENERATOR = ("weights", "workspace", "kv_cache", "kv_bytes_per_sequence", "update")
HOST = ("versions", "saving", "processes", "total")

# GiB. The largest bucket is the embedding: 0.979 (8B) or 1.927 (Scout); export is three of them, a
# difference 3. A generator loads the embedding (8B) or half of a layer's experts (3.75) twice.
# Hosts: on trainer nodes 2.125 versions of 14.96 or 200.74, divided by the nodes; on generator
# nodes all of them, and eight buckets that are being read. Saving: the optimizer of the node's
# ranks, and the parameters of which they are the first ranks: on one node the whole checkpoint (14
# bytes by 8.03e9); of 8B on 16 ranks, all parameters on node 0; of Scout, one of 16 experts on each
# rank (11.25), and the rest on the four ranks of node 0 (5.19 each). On node 0 in addition a file
# of 4 and four buckets (Scout: 2.5 each).
BY_HAND: dict[str, tuple[tuple[float, ...], tuple[float, ...], dict[int, tuple[float, ...]]]] = {
    "scalerl_8b_node": (
        (7.479, 14.958, 22.437, 13.944, 3.603, 2.936, 2.936, 65.357),
        (14.958, 4.023, 49.020, 2.010, 1.957),
        {0: (31.785, 104.70 + 7.914, 64.0, 208.40)},
    ),
    "scalerl_8b": (
        (14.958, 29.915, 5.609, 68.776, 3.603, 2.936, 2.936, 125.797),
        (14.958, 4.061, 139.081, 2.010, 1.957),
        {
            0: (7.946, 4 * 5.609 + 14.958 + 7.914, 40.0, 93.254),
            1: (7.946, 4 * 5.609, 32.0, 62.382),
            4: (39.613, 0.0, 32.0, 71.613),
        },
    ),
    "scalerl_scout": (
        (16.440, 32.881, 75.286, 24.745, 3.726, 5.781, 5.781, 158.859),
        (100.369, 4.084, 53.647, 0.939, 3.750),
        {
            0: (106.642, 4 * (75.286 + 16.440) + 14.0, 40.0, 527.546),
            1: (106.642, 4 * (75.286 + 11.250), 32.0, 484.786),
            4: (441.985, 0.0, 32.0, 473.985),
        },
    ),
}
# GB: 16.06 or 215.5; 2 x 0.3% as differences. Seconds: shares of 4.015, 1.004, 13.47 GB by 50 GB/s
# to the host; twice back, and 30 GB/s; whole, 2 x (bytes + 4 levels x bucket) / 44; as differences,
# a copy at 13 and a checksum at 30 GB/s by eight threads; a checksum by four on one node; bytes of
# a rank by 50.
TIME = (
    "num_bytes", "difference_bytes", "stores", "depth", "copy_by_link", "complete", "travel_whole",
    "travel_differences", "check", "pause_by_link",
)  # fmt: skip
TIME_BY_HAND = {
    "scalerl_8b_node": (16.06e9, 0.0964e9, 0, 0, 0.0803, 0.2945, 0.0, 0.0, 0.134, 0.321),
    "scalerl_8b": (16.06e9, 0.0964e9, 16, 4, 0.0201, 0.0736, 0.921, 0.221, 0.0, 0.321),
    "scalerl_scout": (215.5e9, 1.293e9, 16, 4, 0.2694, 0.988, 10.17, 2.97, 0.0, 2.155),
}
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
    (stage,), generator, hosts = of["stages"], of["generator"], of["hosts"]
    device, generators, by_node = BY_HAND[name]
    assert [host["node"] for host in hosts] == list(by_node)
    assert hosts[-1]["last_node"] == (0 if name == "scalerl_8b_node" else 19)
    for keys, part, values in (
        (DEVICE, stage, device),
        (GENERATOR, generator, generators),
        *((HOST, host, values) for host, values in zip(hosts, by_node.values(), strict=True)),
    ):
        counted = {key: part[key] / GIB for key in keys}
        assert counted == pytest.approx(dict(zip(keys, values, strict=True)), rel=0.05)
    assert generator["sequences"] == pytest.approx(SEQUENCES[name], rel=0.05)
    update = {k: v["PCIe 5 x16"] if "by_link" in k else v for k, v in plan["update"].items()}
    by_hand = dict(zip(TIME, TIME_BY_HAND[name], strict=True))
    assert update == pytest.approx({"changed_share": 0.003, **by_hand}, rel=0.05)
    for part in (*(f"  {key} GiB" for key in DEVICE), "workspace", "an update", *HOST, "pause"):
        assert part in output, part


def test_the_kubernetes_example_fits_its_gpus_and_its_pods(tmp_path: Path) -> None:
    text = (EXAMPLES / "cluster" / "kubernetes.yaml").read_text()
    (config,) = (d for d in yaml.safe_load_all(text) if d["kind"] == "ConfigMap")
    (tmp_path / "run.yaml").write_text(config["data"]["run.yaml"])
    run = load_config(tmp_path / "run.yaml")
    memory = estimate(run, architecture(named_config(run.model)))
    assert (memory.misfits, memory.notes) == ([], [])


def test_an_update_takes_two_copies_and_a_bucket_per_level_whatever_the_number_of_nodes() -> None:
    # GB: Scout has 215.54, its largest bucket 2.069. Two stores take from the trainer's stores, two
    # from each of those, and so on: 2, 6, 14 and 30 stores have 1, 2, 3 and 4 levels.
    for ranks, stores, depth in ((8, 2, 1), (24, 6, 2), (28, 7, 3), (120, 30, 4), (124, 31, 5)):
        run, memory = planned("scalerl_scout", roles={"generator_ranks": ranks})
        update = update_time(run, architecture(named_config(run.model)))
        copies = 1 if stores == 2 else 2
        assert (update.stores, update.depth) == (stores, depth)
        assert update.travel_whole == pytest.approx(copies * (215.54 + depth * 2.069) / 44, 1e-3)
        _, few = planned("scalerl_scout")
        assert memory.worst == few.worst and memory.hosts[-1].total == few.hosts[-1].total
    # One trainer node has to send both copies.
    one = planned("scalerl_scout", roles={"trainer_ranks": 4, "generator_ranks": 8})[0]
    a = architecture(named_config(one.model))
    assert update_time(one, a).travel_whole == pytest.approx(2 * (215.54 + 2.069) / 44, 1e-3)


def test_differences_that_do_not_pay_travel_as_whole_buckets() -> None:
    run, _ = planned("scalerl_8b")
    a, whole = architecture(named_config(run.model)), 16_060_522_496
    # More than 1/16 of the bytes: four bytes for each of more than 1/32 of the 16-bit values.
    for share, num_bytes in ((0.001, 0.002 * whole), (1 / 32, whole / 16), (0.04, whole)):
        assert update_time(run, a, share).difference_bytes == pytest.approx(num_bytes, 1e-6)
    run, _ = planned("scalerl_8b", precision={"params": "fp32"})
    assert update_time(run, a).difference_bytes == update_bytes(run, a) == 2 * whole


def test_engines_read_the_trainers_stores_where_they_can() -> None:
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"trainer_ranks": 4, "generator_ranks": 4, "gpus_per_node": 8}, []),
        ({"trainer_ranks": 8, "generator_ranks": 8, "gpus_per_node": 8}, [1]),
        # A node of both, whose engines need the buckets of the other trainers, too.
        ({"trainer_ranks": 12, "generator_ranks": 4, "gpus_per_node": 8}, [1]),
    ]
    for roles, stores in cases:
        run, memory = planned("scalerl_8b_node", roles=roles)
        assert nodes_of(run).stores == stores
    # GiB: a third of 2.125 versions, and whole ones with eight buckets.
    assert memory.hosts[1].versions / GIB == pytest.approx(31.785 / 3 + 39.613, 1e-3)
    run, memory = planned("scalerl_8b", weights={"directory": Path("/shared/weights")})
    assert nodes_of(run).stores == [] and {h.versions for h in memory.hosts} == {0}
    a = architecture(named_config(run.model))
    assert update_time(run, a).travel_whole == pytest.approx(16 * 16.06 / 5, 1e-3)


def test_layers_of_chunked_attention_keep_their_last_chunk() -> None:
    run, memory = planned("scalerl_scout")
    # Every fourth layer of 48 keeps all tokens; 4 heads of 128, keys and values, bf16.
    tokens = 12 * run.sequence_tokens + 36 * 8192
    assert memory.generator.kv_bytes_per_sequence == 2 * 4 * 128 * 2 * tokens


def test_notes_name_preemption_and_time_outs_that_are_too_short() -> None:
    _, memory = planned(
        "scalerl_scout",
        generation={"concurrent_completions": 64},
        timeouts={"startup_seconds": 900.0, "transfer_seconds": 10.0},
    )
    preempts, transfer, start = memory.notes
    assert memory.misfits == []
    assert "holds 89% of generation.concurrent_completions = 64 at full length" in preempts
    assert "lower it to 57" in preempts
    assert "takes 10 s to the last node" in transfer
    assert "timeouts.transfer_seconds is 10: raise it" in transfer
    assert "20 nodes read 4.3 TB" in start and "about 1162 s" in start


def test_a_host_that_is_too_small_and_an_update_that_is_too_large_are_misfits() -> None:
    _, memory = planned(
        "scalerl_scout", roles={"host_gib": 480.0}, generation={"gpu_memory_fraction": 0.985}
    )
    update, host = memory.misfits
    assert "an update of the weights takes 3.8 GiB" in update and "= 0.985 leaves 2.8" in update
    assert "host of node 0: 527.5 GiB, but roles.host_gib is 480" in host
    assert "versions of the weights 106.6, saving 380.9, processes 40.0" in host
    for remedy in ({"directory": Path("/shared/weights")}, {"quantization": "fp8"}):
        assert next(iter(remedy)) in host
        _, memory = planned("scalerl_scout", roles={"host_gib": 480.0}, weights=remedy)
        assert memory.misfits == [], remedy


def test_shared_memory_of_the_usual_size_that_is_too_small_is_a_note() -> None:
    _, memory = planned("scalerl_scout", roles={"host_gib": 800.0})
    (note,) = memory.notes
    assert "nodes 4-19: versions of the weights take 427 GiB of /dev/shm" in note and "400" in note


def test_the_stores_of_a_stage_share_its_buckets_evenly_over_all_its_ranks() -> None:
    """`trainer.export` really fills them so: the plan's share against its buckets, rank by rank."""
    from megatron_rl.trainer.export import _fill, _Shard

    layouts: list[tuple[str, int, dict[str, Any]]] = [
        ("scalerl_scout", 16, {}),
        ("scalerl_8b", 16, {}),
        ("qwen3-30b-a3b", 16, {"pipeline": 2, "expert": 4, "tensor": 2}),
    ]
    for name, trainers, sizes in layouts:
        run, _ = planned(name if name.startswith("scalerl") else "scalerl_8b")
        run = run.model_copy(update={"parallel": run.parallel.model_copy(update=sizes)})
        a, p = architecture(named_config(run.model if "qwen" not in name else name)), run.parallel
        per_stage, held = trainers // p.pipeline, dict.fromkeys(range(trainers), 0.0)
        stage_of = {part: s for s in range(p.pipeline) for part in stage_parts(a, p, s)}
        units = []
        for i, weight in enumerate(a.weights()):
            if not weight.exported:
                continue
            module = weight.megatron.partition(".")[0]
            first = per_stage * stage_of[module if weight.layer is None else weight.layer]
            ranks = list(range(first, first + per_stage))
            if weight.expert is not None:
                group = weight.expert // (a.experts // p.expert)
                ranks = [r for r in ranks if (r - first) // p.expert_tensor % p.expert == group]
            shape = (weight.elements,)
            units.append([[_Shard(i, 0, 1, rank, shape, torch.bfloat16) for rank in ranks]])
        largest = max(unit[0][0].num_bytes for unit in units)
        for bucket in _fill(units, run.weights.bucket_bytes, spread=True):
            held[bucket.destination] += sum(shard.num_bytes for shard in bucket.shards)
        for rank, num_bytes in held.items():
            planned_bytes = share_bytes(run, a, rank // per_stage)
            assert abs(num_bytes - planned_bytes) < largest, (name, rank)
        assert sum(held.values()) == update_bytes(run, a)


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
