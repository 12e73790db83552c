"""Ablations: order, resumption, budgets and results; only the process of a run is faked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.commands.ablate import ablation_results, runs
from megatron_rl.config import ConfigError
from megatron_rl.metrics.metrics_file import MetricsWriter, read_metrics

STEPS = 40
EVALUATED = (0, 4, 8, 12, 18, 26, 40)
TOKENS_PER_STEP = 100.0


class FakeRuns:
    """Stands for `megatron-rl`: writes the metrics of runs that learn on a sigmoid."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.dies_at: int | None = None
        self.slower = "none"

    def call(
        self, arguments: list[str], log: Path, stop: Callable[[], bool] = lambda: False
    ) -> int:
        self.calls.append(arguments)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("log")
        output = Path(arguments[arguments.index("--output_dir") + 1])
        if arguments[0] == "sft":
            start = output / "start" / "tiny_scout"
            start.mkdir(parents=True)
            (start / "model.safetensors").write_bytes(b"")
            return 0
        return self._train(arguments, output, stop)

    def _train(self, arguments: list[str], output: Path, stop: Callable[[], bool]) -> int:
        middle = 2000 if self.slower in arguments else 1000
        seed = int(arguments[arguments.index("--seed") + 1])
        resumed = "--resume" in arguments
        path = output / "metrics.jsonl"
        first = sum(r["kind"] == "step" for r in read_metrics(path)) if resumed else 0
        with MetricsWriter(path, resume_step=first if resumed else None) as writer:
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
                if step + 1 == self.dies_at:
                    self.dies_at = None
                    (output / "checkpoints" / "step_000010").mkdir(parents=True)
                    (output / "checkpoints" / "step_000010" / "trainer.json").write_text("{}")
                    return 1
                if stop():
                    return 130
        return 0


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    runs_of_test = FakeRuns()
    monkeypatch.setattr(runs, "call", runs_of_test.call)
    return runs_of_test


def execute(output: Path, **changes: Any) -> tuple[list[runs.Run], list[str]]:
    values: dict[str, Any] = {
        "recipes": ("scalerl", "grpo"),
        "seeds": 2,
        "overrides": ("--schedule.steps", str(STEPS)),
        **changes,
    }
    lines: list[str] = []
    return list(runs.execute(runs.Ablation(output=output, **values), lines.append)), lines


def test_every_recipe_runs_with_every_seed_from_one_start(tmp_path: Path, fake: FakeRuns) -> None:
    finished, _ = execute(tmp_path)
    names = ["scalerl/seed-1", "grpo/seed-1", "scalerl/seed-2", "grpo/seed-2"]
    assert [r.name for r in finished] == names
    sft, *trained = fake.calls
    assert sft[0] == "sft"
    for call in trained:
        start = call[call.index("--start_checkpoint") + 1]
        assert start == str(tmp_path / "start/start/tiny_scout")
        assert call[call.index("--tasks.arithmetic.seed") + 1] == "1234"
    assert [run.ended_by() for run in finished] == ["steps"] * 4
    # Problems and their split are the same for all seeds.
    configs = [run.config for run in finished]
    assert {c.seed_of("arithmetic") for c in configs} == {1234}
    assert {c.seed for c in configs} == {1, 2}
    assert {c.algorithm.loss.kind for c in configs} == {"cispo", "ppo_clip"}


def test_a_given_start_needs_no_supervised_stage(tmp_path: Path, fake: FakeRuns) -> None:
    execute(tmp_path, seeds=1, start_checkpoint=tmp_path / "mine")
    assert [call[0] for call in fake.calls] == ["train", "train"]
    for call in fake.calls:
        assert call[call.index("--start_checkpoint") + 1] == str(tmp_path / "mine")


def test_the_same_command_continues_what_is_unfinished(tmp_path: Path, fake: FakeRuns) -> None:
    fake.dies_at = 12
    with pytest.raises(runs.RunFailed, match=r"scalerl/seed-1 ended with status 1: see .*log\.txt"):
        execute(tmp_path)
    assert sum(call[0] == "train" for call in fake.calls) == 4  # the others ran all the same
    fake.calls = []
    finished, lines = execute(tmp_path)
    assert len(finished) == 4
    assert [call[0] for call in fake.calls] == ["train"]
    assert "--resume" in fake.calls[0]
    assert sum(line.endswith("running") for line in lines) == 1


def test_more_seeds_and_recipes_join_a_folder(tmp_path: Path, fake: FakeRuns) -> None:
    execute(tmp_path, seeds=1)
    fake.calls = []
    finished, _ = execute(tmp_path, seeds=2, recipes=("scalerl", "grpo", "dapo"))
    assert len(finished) == 6
    assert len(fake.calls) == 4


def test_a_folder_of_another_ablation_is_refused(tmp_path: Path) -> None:
    execute(tmp_path)
    with pytest.raises(ConfigError, match="made with another overrides"):
        execute(tmp_path, overrides=("--schedule.steps", "39"))
    with pytest.raises(ConfigError, match="made with another tokens"):
        execute(tmp_path, tokens=5)


@pytest.mark.parametrize(
    ("budget", "ended", "steps"),
    [
        ({"tokens": 1500}, "tokens", 15),
        ({"minutes": 1.0}, "minutes", 20),
        ({"tokens": 1500, "minutes": 1.0}, "tokens", 15),
        ({}, "steps", STEPS),
    ],
)
def test_a_run_ends_at_its_budget(
    tmp_path: Path, budget: dict[str, Any], ended: str, steps: int
) -> None:
    finished, _ = execute(tmp_path, seeds=1, recipes=("grpo",), **budget)
    assert finished[0].ended_by() == ended
    assert sum(row["kind"] == "step" for row in finished[0].rows()) == steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipes": ("scalerl", "scale")}, "recipe scale: recipe is 'scale': no such recipe"),
        ({"recipes": ("grpo", "grpo")}, "--recipes is 'grpo,grpo'"),
        ({"recipes": ()}, "--recipes is ''"),
        ({"overrides": ("--schedule.step", "3")}, "schedule.step: unknown key"),
    ],
)
def test_invalid_settings_are_refused_before_anything_starts(
    tmp_path: Path, fake: FakeRuns, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as e:
        execute(tmp_path, **changes)
    assert message in str(e.value)
    assert fake.calls == []


def test_runs_and_recipes_are_fitted_and_compared(tmp_path: Path, fake: FakeRuns) -> None:
    fake.slower = "grpo"
    finished, _ = execute(tmp_path)
    written = ablation_results.write(finished, tmp_path)
    assert written == json.loads((tmp_path / "comparison.json").read_text())
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    results = written["results"]
    assert list(results) == ["scalerl", "grpo", *(run.name for run in finished)]
    # Both seeds lie on one sigmoid: the fit recovers its Cmid, as far as 7 points allow.
    assert results["scalerl"]["runs"] == 2
    assert results["scalerl"]["fit"]["Cmid"]["value"] == pytest.approx(1000, rel=0.2)
    assert results["grpo"]["fit"]["Cmid"]["value"] == pytest.approx(2000, rel=0.3)
    assert results["scalerl"]["first"] == pytest.approx(0.303, abs=1e-6)
    table = (tmp_path / "comparison.md").read_text()
    assert "| scalerl | 2 | steps | 80 | 8,000 | 4.0 | 0.303 -> " in table
    assert "| grpo/seed-2 | 1 | steps | 40 | 4,000 | 2.0 |" in table
    (pair,) = written["comparison"]["pairs"]
    assert f"- {pair['better']} over {pair['other']}: {pair['verdict']}" in table


def test_a_single_recipe_has_fits_and_no_ranking(tmp_path: Path) -> None:
    finished, _ = execute(tmp_path, recipes=("scalerl",), seeds=1)
    written = ablation_results.write(finished, tmp_path)
    assert "error" in written["comparison"]
    assert written["results"]["scalerl"]["fit"]["A"]["value"] > 0.5
    assert not (tmp_path / "comparison.png").exists()


def test_a_run_with_too_few_evaluations_is_listed_with_the_error(tmp_path: Path) -> None:
    finished, _ = execute(tmp_path, seeds=1, tokens=500)
    written = ablation_results.write(finished, tmp_path)
    assert "error" in written["results"]["grpo"]["fit"]
    assert "more evaluations" in (tmp_path / "comparison.md").read_text()


def test_a_call_is_interrupted_once_it_may_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real `call`
    command = tmp_path / "command"
    # Python, like the command itself: a shell cannot trap a SIGINT that it inherited as ignored.
    command.write_text(
        f"#!{sys.executable}\nimport signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(print('stopped') or 130))\n"
        "print('up', flush=True)\ntime.sleep(100)\n"
    )
    command.chmod(0o755)
    monkeypatch.setattr(runs.sys, "executable", str(command))
    log = tmp_path / "log.txt"
    assert runs.call(["train"], log, lambda: "up" in log.read_text()) == 130
    assert log.read_text().split() == ["up", "stopped"]
