"""Arguments that work by megatron_plugin/flags.yaml: a run equals a computation by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_plugin import test_layouts as layouts
from tests.megatron_plugin.test_layouts import DP, EP, EXPERTS, FULL, PP, TP, Run

models, hand = layouts.models, layouts.hand

NO_LOSSES = [*EXPERTS, *layouts.BALANCED]
LOGS = """
  --log-params-norm --log-num-zeros-in-grad --log-throughput --timing-log-level 2
  --check-for-large-grads --check-weight-hash-across-dp-replicas-interval 1 --manual-gc
  --train-sync-interval 1 --ddp-num-buckets 3 --decoupled-lr 1e-3
"""
# The name of a run with two replicas ends in "dp2" or "ep2".
CASES: dict[str, tuple[str, int, list[str]]] = {
    "layers_of_the_first_stage": ("dense", 2, [*PP, "--decoder-first-pipeline-num-layers", "1"]),
    "embedding_and_loss_count_as_layers": (
        "dense",
        2,
        [*PP, "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"],
    ),
    "pipeline_layout": ("dense", 2, [*PP, "--pipeline-model-parallel-layout", "Et|t*3L"]),
    "saved_activations": ("dense", 2, [*TP, *FULL, "--distribute-saved-activations"]),
    "chunks": ("dense", 1, ["--mlp-chunks-for-training", "2", "--apply-query-key-layer-scaling"]),
    "instances_dp2": ("dense", 2, [*DP, "--num-distributed-optimizer-instances", "2"]),
    "mapping_dp2": ("dense", 4, [*PP, "--use-tp-pp-dp-mapping"]),
    "logs_and_checks_dp2": ("dense", 2, LOGS.split()),
    "ep2": ("moe", 2, [*NO_LOSSES, *EP, "--moe-token-dispatcher-type", "allgather"]),
    "recomputed_experts": (
        "moe",
        1,
        [*NO_LOSSES, "--recompute-granularity", "selective", "--recompute-modules", "moe"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_working_argument_equals_the_computation_by_hand(
    models: dict[str, Path], hand: dict[str, Run], tmp_path: Path, case: str
) -> None:
    model, ranks, given = CASES[case]
    result = layouts.run(tmp_path / f"{model}-{case}", models[model], ranks, given)
    layouts.assert_equal(result, hand[model])


def test_samples_in_place_of_iterations(
    models: dict[str, Path],
    hand: dict[str, Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = layouts.TRAINING.index("--train-iters")
    monkeypatch.setattr(layouts, "TRAINING", layouts.TRAINING[:at] + layouts.TRAINING[at + 2 :])
    samples = ["--train-samples", str(4 * layouts.STEPS + 3), "--lr-decay-samples", "100"]
    result = layouts.run(tmp_path / "dense-samples", models["dense"], 1, samples)
    layouts.assert_equal(result, hand["dense"])
