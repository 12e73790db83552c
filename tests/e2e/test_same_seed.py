"""Same seed, same run: `schedule.mode synchronous` with one engine, bit for bit.

Three runs at the same time from one start, two of them with one seed. What they load each other's
cores with changes when completions begin and end, and so what each engine computes together.

The ranks of the first and of the other one, which is short, are forks that have imported Megatron;
those of the second are torchrun's, with hashes and random states of their own.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.processes import TORCHRUN, finish, hide, rows, start
from tests.fleet.tiny_run import HELD_OUT
from tests.workers import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS, SHORT = 12, 2
RUNS = {"first": (5, STEPS), "second": (5, STEPS), "other": (6, SHORT)}
"""Name -> (seed, steps)."""
SETTINGS = [
    *("--schedule.mode", "synchronous", "--schedule.max_lag_steps", "0"),
    *("--roles.trainer_ranks", "1", "--roles.generator_ranks", "1", "--task.seed", "1"),
    *("--optimizer.learning_rate", "1e-3", "--evaluation.every_steps", "6"),
    *("--checkpoint.every_steps", "100"),
]
TIMES = re.compile(r"seconds|_per_second|device_hours|(wait|busy)_fraction|engine$")


@dataclass(frozen=True)
class Finished:
    """What a run left behind, without times."""

    metrics: list[dict[str, Any]]
    rollouts: dict[str, list[dict[str, Any]]]
    weights: dict[str, torch.Tensor]


def without_times(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not TIMES.search(name)}


def completions(path: Path) -> list[dict[str, Any]]:
    table = pq.read_table(path).to_pylist()
    return [without_times(r) for r in sorted(table, key=lambda r: (r["group"], r["index"]))]


def read(output: Path) -> Finished:
    metrics = [without_times(row) for kind in ("step", "eval") for row in rows(output, kind)]
    rollouts = {path.name: completions(path) for path in (output / "rollouts").iterdir()}
    return Finished(metrics, rollouts, load_file(output / "final" / "model.safetensors"))


@pytest.fixture(scope="module")
def runs(tiny_start: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    folder, config = tmp_path_factory.mktemp("seeds"), tiny_start / "tiny.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", hide(folder / "hidden", "wandb"))
        torchrun = [*TORCHRUN, "--nproc-per-node=2", "--max-restarts=0", "examples/scalerl_tiny.sh"]
        options = {
            name: [
                *("--config", str(config), *SETTINGS, "--output_dir", str(folder / name)),
                *("--seed", f"{seed}", "--schedule.steps", f"{steps}"),
            ]
            for name, (seed, steps) in RUNS.items()
        }
        log = folder / "second.txt"
        second = start([*torchrun, *options.pop("second")], log)
        try:
            forks = [["train", *of_run] for of_run in options.values()]
            (folder / "runs.json").write_text(json.dumps(forks))
            run_ranks("tests.e2e.seed_worker", 2 * len(forks), folder, seconds=420)
        except BaseException:
            second.terminate()
            second.wait(60)
            raise
        finish(second, log)
    return {name: read(folder / name) for name in RUNS}


def test_a_run_with_the_same_seed_has_the_same_completions(runs: dict[str, Finished]) -> None:
    first, second = runs["first"].rollouts, runs["second"].rollouts
    assert len(first) == STEPS + 3  # evaluations at 0, 6 and 12
    assert first.keys() == second.keys()
    # As text: a number is written out in full, and what is not a number equals itself.
    assert [name for name in sorted(first) if repr(first[name]) != repr(second[name])] == []


def test_a_run_with_the_same_seed_has_the_same_metrics(runs: dict[str, Finished]) -> None:
    first, second = runs["first"].metrics, runs["second"].metrics
    assert len(first) == STEPS + 3
    assert first == second
    assert {"loss", "grad_norm", "pass_rate", "logprob_error_max"} <= {k for r in first for k in r}


def test_a_run_with_the_same_seed_has_the_same_weights(runs: dict[str, Finished]) -> None:
    first, second = runs["first"].weights, runs["second"].weights
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_a_run_with_another_seed_is_another_run(runs: dict[str, Finished]) -> None:
    first, other = runs["first"], runs["other"]
    # The same weights and held-out prompts: only the noise differs.
    before, after = (run.rollouts["eval_000000.parquet"] for run in (first, other))
    prompts = [r["prompt"] for r in before]
    assert prompts == [r["prompt"] for r in after] and len(set(prompts)) == HELD_OUT
    same = sum(a["token_ids"] == b["token_ids"] for a, b in zip(before, after, strict=True))
    assert same < len(before) / 2
    steps = [[row for row in run.metrics if row["kind"] == "step"] for run in (first, other)]
    assert len(steps[1]) == SHORT
    for a, b in zip(*steps, strict=False):
        assert a["grad_norm"] != b["grad_norm"]  # and so the weights after it
        assert a["loss"] != b["loss"]
