"""Compute of a run in FLOPs: only the parameters that a token visits count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_rl import messages
from megatron_rl.config import load_config
from megatron_rl.models import architecture, named_config
from megatron_rl.orchestrator.run_metrics import RunMetrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "scalerl_scout.yaml"


def test_compute_flops_of_scout_count_17b_parameters_per_token() -> None:
    config = load_config(EXAMPLE, [])
    active = architecture(named_config(config.model)).active_parameters()
    assert round(active / 1e9, 1) == 17.2
    rows: list[dict[str, Any]] = []
    sink: Any = SimpleNamespace(step=rows.append)
    metrics = RunMetrics(sink, ranks=config.roles.world_size)
    metrics.active_parameters = active
    metrics.batch(0, {"tokens": 1000})
    metrics.step(
        messages.StepDone(
            step=0,
            metrics={"tokens_trained": 900.0},
            probe_logprobs=[],
            wait_seconds=0.0,
            train_seconds=1.0,
        )
    )
    # Two per parameter for a generated token, six for a trained one.
    assert rows[0]["compute_flops"] == (2 * 1000 + 6 * 900) * active
