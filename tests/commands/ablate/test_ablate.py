"""Ablations: order, resumption, budgets and results; only the run's process is made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.commands.ablate import ablation_results, runs
from megatron_rl.config import ConfigError
from megatron_rl.metrics.metrics_file import MetricsWriter

STEPS = 40
EVALUATED = (0, 4, 8, 12, 18, 26, 40)
TOKENS_PER_STEP = 100.0


class FakeRun:
    """Stands for `megatron-rl`: writes the metrics of a run that learns on a sigmoid."""

    calls: list[list[str]]
    dies_at: int | None
    slower: str

    def __init__(self, arguments: list[str], log: Path) -> None:
        FakeRun.calls.append(arguments)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("log")
        self.output = Path(arguments[arguments.index("--output_dir") + 1])
        self.arguments = arguments

    def wait(self, enough: Callable[[], bool]) -> int:
        if self.arguments[0] == "sft":
            start = self.output / "start" / "tiny_scout"
            start.mkdir(parents=True)
            (start / "model.safetensors").write_bytes(b"")
            return 0
        middle = 2000 if FakeRun.slower in self.arguments else 1000
        seed = int(self.arguments[self.arguments.index("--seed") + 1])
        first = 0
        resumed = "--resume" in self.arguments
        if resumed:
            first = len([r for r in self._rows() if r["kind"] == "step"])
        writer = MetricsWriter(
            self.output / "metrics.jsonl", resume_step=first if resumed else None
        )
        for step in range(first, STEPS + 1):
            tokens = TOKENS_PER_STEP * step
            if step in EVALUATED and not (resumed and step == first):
                rate = 0.3 + 0.5 / (1 + (middle / max(tokens, 1e-9)) ** 1.3) + 0.002 * seed
                writer.eval(
                    {
                        "step": step, "compute_tokens": tokens, "pass_rate": rate,
                        "pass_rate_stderr": 0.01,
                    }
                )  # fmt: skip
            if step == STEPS:
                break
            writer.step(
                {
                    "step": step, "compute_tokens": tokens + TOKENS_PER_STEP,
                    "wall_seconds": 3.0 * (step + 1), "loss": 0.0,
                }
            )  # fmt: skip
            if step + 1 == FakeRun.dies_at:
                FakeRun.dies_at = None
                writer.close()
                (self.output / "checkpoints" / "step_000010").mkdir(parents=True)
                (self.output / "checkpoints" / "step_000010" / "trainer.json").write_text("{}")
                return 1
            if enough():
                writer.close()
                return 130
        writer.close()
        return 0

    def _rows(self) -> list[Any]:
        from megatron_rl.metrics.metrics_file import read_metrics

        return read_metrics(self.output / "metrics.jsonl")


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRun]:
    FakeRun.calls, FakeRun.dies_at, FakeRun.slower = [], None, "none"
    monkeypatch.setattr(runs, "_Process", FakeRun)
    return FakeRun


def plan(output: Path, **changes: Any) -> runs.Plan:
    values: dict[str, Any] = {
        "recipes": ("scalerl", "grpo"),
        "seeds": 2,
        "output": output,
        "overrides": ("--schedule.steps", str(STEPS)),
    }
    return runs.Plan(**{**values, **changes})


def execute(a_plan: runs.Plan) -> tuple[list[runs.Run], list[str]]:
    said: list[str] = []
    return list(runs.execute(a_plan, said.append)), said


def test_every_recipe_runs_with_every_seed_from_one_start(tmp_path: Path) -> None:
    over, _ = execute(plan(tmp_path))
    assert [r.name for r in over] == [
        "scalerl/seed-1",
        "grpo/seed-1",
        "scalerl/seed-2",
        "grpo/seed-2",
    ]
    sft, *trained = FakeRun.calls
    assert sft[0] == "sft"
    for call in trained:
        assert call[call.index("--start_checkpoint") + 1] == str(
            tmp_path / "start/start/tiny_scout"
        )
        assert call[call.index("--tasks.arithmetic.seed") + 1] == "1234"
    assert [run.done() for run in over] == ["steps"] * 4


def test_problems_and_split_are_the_same_for_all_seeds(tmp_path: Path) -> None:
    configs = [run.load() for run in plan(tmp_path).runs()]
    assert {c.seed_of("arithmetic") for c in configs} == {1234}
    assert {c.seed for c in configs} == {1, 2}
    assert {c.algorithm.loss.kind for c in configs} == {"cispo", "ppo_clip"}


def test_the_same_command_goes_on_with_what_is_not_over(tmp_path: Path) -> None:
    FakeRun.dies_at = 12
    with pytest.raises(runs.RunFailed, match=r"scalerl/seed-1 ended with status 1: see .*log\.txt"):
        execute(plan(tmp_path))
    failed = [call for call in FakeRun.calls if call[0] == "train"]
    assert len(failed) == 4  # the others ran all the same
    FakeRun.calls = []
    over, said = execute(plan(tmp_path))
    assert len(over) == 4
    assert [call[0] for call in FakeRun.calls] == ["train"]
    assert "--resume" in FakeRun.calls[0]
    assert sum("over before" in line for line in said) == 3


def test_more_seeds_and_recipes_join_a_folder(tmp_path: Path) -> None:
    execute(plan(tmp_path, seeds=1))
    FakeRun.calls = []
    over, _ = execute(plan(tmp_path, seeds=2, recipes=("scalerl", "grpo", "dapo")))
    assert len(over) == 6
    assert len(FakeRun.calls) == 4


def test_a_folder_of_another_ablation_is_refused(tmp_path: Path) -> None:
    execute(plan(tmp_path))
    with pytest.raises(ConfigError, match="made with another overrides"):
        execute(plan(tmp_path, overrides=("--schedule.steps", "39")))
    with pytest.raises(ConfigError, match="made with another budget"):
        execute(plan(tmp_path, budget=runs.Budget(tokens=5)))


@pytest.mark.parametrize(
    ("budget", "ended", "steps"),
    [
        (runs.Budget(tokens=1500), "tokens", 15),
        (runs.Budget(minutes=1.0), "minutes", 20),
        (runs.Budget(tokens=1500, minutes=1.0), "tokens", 15),
        (runs.Budget(), "steps", STEPS),
    ],
)
def test_a_run_ends_at_its_budget(
    tmp_path: Path, budget: runs.Budget, ended: str, steps: int
) -> None:
    over, _ = execute(plan(tmp_path, seeds=1, recipes=("grpo",), budget=budget))
    assert over[0].done() == ended
    assert sum(row["kind"] == "step" for row in over[0].rows()) == steps


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipes": ("scalerl", "scale")}, "recipe scale: recipe is 'scale': no such recipe"),
        ({"recipes": ("grpo", "grpo")}, "--recipes is 'grpo,grpo'"),
        ({"recipes": ()}, "--recipes is ''"),
        ({"seeds": 0}, "--seeds is 0"),
        ({"overrides": ("--schedule.step", "3")}, "schedule.step: unknown key"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as e:
        execute(plan(tmp_path, **changes))
    assert said in str(e.value)
    assert FakeRun.calls == []


def test_runs_and_recipes_are_fitted_and_compared(tmp_path: Path) -> None:
    FakeRun.slower = "grpo"
    over, _ = execute(plan(tmp_path))
    found = ablation_results.write(over, tmp_path)
    assert found == json.loads((tmp_path / "comparison.json").read_text())
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    assert set(found["runs"]) == {run.name for run in over}
    scalerl, grpo = (found["recipes"][name] for name in ("scalerl", "grpo"))
    # Both seeds lie on one sigmoid: its Cmid comes back, within what 7 points allow.
    assert scalerl["runs"] == 2
    assert scalerl["fit"]["Cmid"]["value"] == pytest.approx(1000, rel=0.2)
    assert grpo["fit"]["Cmid"]["value"] == pytest.approx(2000, rel=0.3)
    assert scalerl["first"] == pytest.approx(0.303, abs=1e-6)
    table = (tmp_path / "comparison.md").read_text()
    assert "| scalerl | 2 | 0.303 -> " in table
    assert "| grpo/seed-2 | steps | 40 | 4,000 | 2.0 |" in table


def test_one_recipe_alone_has_fits_and_no_ranking(tmp_path: Path) -> None:
    over, _ = execute(plan(tmp_path, recipes=("scalerl",), seeds=1))
    found = ablation_results.write(over, tmp_path)
    assert "error" in found["comparison"]
    assert found["recipes"]["scalerl"]["fit"]["A"]["value"] > 0.5
    assert not (tmp_path / "comparison.png").exists()


def test_a_run_with_too_few_evaluations_is_told_and_not_hidden(tmp_path: Path) -> None:
    over, _ = execute(plan(tmp_path, seeds=1, budget=runs.Budget(tokens=500)))
    found = ablation_results.write(over, tmp_path)
    assert "error" in found["recipes"]["grpo"]["fit"]
    assert "DataError" in (tmp_path / "comparison.md").read_text()
