"""Studies: runs, order, resumption, budgets and results; only `megatron-rl train` is faked."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from megatron_rl import recipes
from megatron_rl.cli import main
from megatron_rl.commands.plan.memory import estimate
from megatron_rl.commands.study import runs, study_file, study_results
from megatron_rl.config import ConfigError, load_config
from megatron_rl.metrics.metrics_file import read_metrics
from megatron_rl.models import architecture, named_config
from megatron_rl.scaling.paper_points import published, published_table
from tests.commands.study import fake_train

ROOT = Path(__file__).resolve().parents[3]
STEPS = 40
FILE = {
    "config": "tiny",
    "seeds": 2,
    "values": {"schedule.steps": STEPS},
    "runs": [{"recipe": ["scalerl", "grpo"]}],
}


class FakeRuns:
    """Stands for `call`."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.stops_at: int | None = None
        self.slower = "none"

    def call(
        self, arguments: list[str], log: IO[bytes], stop: Callable[[], bool] = lambda: False
    ) -> int:
        self.calls.append(arguments)
        if arguments[0] == "sft":
            return fake_train.sft(arguments)

        def stops(step: int) -> bool:
            if step == self.stops_at:
                self.stops_at = None
                return True
            return stop()

        return fake_train.train(arguments, stops, 2000 if self.slower in arguments else 1000)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    runs_of_test = FakeRuns()
    monkeypatch.setattr(runs, "call", runs_of_test.call)
    return runs_of_test


def study(folder: Path, *overrides: str, start: Path | None = None, **changes: Any) -> Any:
    """Write FILE with other keys, and load it."""
    folder.mkdir(exist_ok=True)
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(FILE | changes))
    return study_file.load(str(path), {}, folder, (), start, overrides)


def execute(folder: Path, *overrides: str, **changes: Any) -> list[runs.Run]:
    return list(runs.execute(study(folder, *overrides, **changes).runs()))


def test_every_recipe_runs_with_every_seed_from_one_start(tmp_path: Path, fake: FakeRuns) -> None:
    finished = execute(tmp_path)
    names = ["scalerl/seed-1", "grpo/seed-1", "scalerl/seed-2", "grpo/seed-2"]
    assert [r.name for r in finished] == names
    sft, *trained = fake.calls
    assert sft[0] == "sft"
    for call in trained:
        start = str(tmp_path / "start/tiny/start/tiny_scout")
        assert fake_train.option(call, "start_checkpoint") == start
    assert [run.ended_by() for run in finished] == ["steps"] * 4
    # Problems and their split are the same for all seeds.
    configs = [run.config for run in finished]
    assert {c.seed_of("arithmetic") for c in configs} == {1234}
    assert {c.seed for c in configs} == {1, 2}
    assert {c.algorithm.loss.kind for c in configs} == {"cispo", "ppo_clip"}


def test_a_given_start_needs_no_supervised_stage(tmp_path: Path, fake: FakeRuns) -> None:
    with pytest.raises(ConfigError, match="mine has no config.json"):
        execute(tmp_path, start=tmp_path / "mine")
    fake_train.sft(["sft", "--config", str(study_file.FOLDER / "tiny.yaml"),
                    "--output_dir", str(tmp_path / "own")])  # fmt: skip
    execute(tmp_path, seeds=1, start=tmp_path / "own/start/tiny_scout")
    assert [call[0] for call in fake.calls] == ["train", "train"]


def test_grids_names_seeds_and_repeats(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "summary: s\nsource: t\nbase: grpo\nvalues: {optimizer: {weight_decay: 0.5}}\n"
    )
    entries = [
        {"recipe": ["scalerl", "own.yaml"], "schedule.prompts_per_step": [8, 16], "seeds": [7]},
        {"name": "long", "generation.thinking_budget_tokens": [[28, 28]], "repeats": 2},
    ]
    expanded = {run.name: run.config for run in study(tmp_path, runs=entries, seeds=1).runs()}
    assert list(expanded) == [
        *(f"{r}-prompts_per_step={n}/seed-7" for r in ("scalerl", "own") for n in (8, 16)),
        "long/seed-1", "long/seed-1-repeat-2",
    ]  # fmt: skip
    own = expanded["own-prompts_per_step=8/seed-7"]
    assert (own.optimizer.weight_decay, own.algorithm.loss.max_ratio) == (0.5, 1.2)
    assert own.schedule.prompts_per_step == 8
    assert expanded["long/seed-1"].generation.thinking_budget_tokens == (28, 28)


def test_all_recipes_keep_their_batches_and_schedules_on_the_8b_base(tmp_path: Path) -> None:
    entries = [{"recipe": recipes.names()}]
    for run in study(tmp_path, runs=entries, config="8b", seeds=1, values={}).runs():
        alone = load_config(None, ["--recipe", run.group])
        fixed = {"steps", "micro_batch_tokens"}
        assert run.config.schedule.model_dump(exclude=fixed) == alone.schedule.model_dump(
            exclude=fixed
        )
        assert (
            run.config.generation.thinking_budget_tokens == alone.generation.thinking_budget_tokens
        )


def test_the_bases_are_the_machines_and_models_of_the_examples() -> None:
    for base, example in (("8b", "scalerl_8b"), ("scout", "scalerl_scout")):
        ours, theirs = (
            load_config(path, ["--recipe", "scalerl"])
            for path in (study_file.FOLDER / f"{base}.yaml", ROOT / f"examples/{example}.yaml")
        )
        assert ours.model_copy(update={"output_dir": theirs.output_dir}) == theirs, base


def test_the_studies_of_the_paper(tmp_path: Path) -> None:
    sizes = {"fig2": 5, "loo": 9, "forward": 14, "axes": 8, "ablation": 2}
    assert {name: len(study_file.load(name, {}).runs()) for name in study_file.PRESETS} == sizes
    fig2 = study_file.load("fig2", {}).runs()
    hours = {run.group: round(run.gpu_hours or 0, -3) for run in fig2}
    assert hours == {"scalerl": 16e3, "minimax": 16e3, "magistral": 8e3, "dapo": 8e3, "grpo": 8e3}
    assert {run.config.model for run in fig2} == {"llama-3.1-8b"}
    assert [run.config.schedule.prompts_per_step for run in fig2] == [48, 80, 80, 80, 48]
    by_name = {run.group: run for run in study_file.load("axes", {}).runs()}
    assert by_name["batch-2048"].gpu_hours == pytest.approx(100_000, rel=0.01)
    for name in ("generations-8", "generations-24", "generations-32"):
        s = by_name[name].config.schedule
        assert s.prompts_per_step * s.completions_per_prompt == 768
    assert by_name["scout"].config.model == "llama-4-scout-17b-16e"
    for run in by_name.values():
        assert not estimate(run.config, architecture(named_config(run.config.model))).misfits
    # Own bases replace those of their models.
    own = [tmp_path / name for name in ("8b.yaml", "scout.yaml")]
    for path in own:
        text = (study_file.FOLDER / path.name).read_text()
        path.write_text(text.replace("gpu_gib: 186", "gpu_gib: 141"))
    for run in study_file.load("axes", {}, tmp_path, tuple(own)).runs():
        assert run.config.roles.gpu_gib == 141
    forward = {run.group: run.config for run in study_file.load("forward", {}).runs()}
    base = forward["baseline"]
    assert base.recipe == "pipeline_rl_8" and forward["gspo"].recipe == "gspo"
    assert (base.schedule.mode, base.schedule.max_lag_steps) == ("pipeline", 8)
    others = [c for name, c in forward.items() if name != "baseline"]
    exclude = {"output_dir"}
    assert all(c.model_dump(exclude=exclude) != base.model_dump(exclude=exclude) for c in others)


def test_the_same_command_continues_what_is_unfinished(tmp_path: Path, fake: FakeRuns) -> None:
    fake.stops_at = 12
    with pytest.raises(runs.RunFailed, match=r"scalerl/seed-1 ended with status 0: see .*log\.txt"):
        execute(tmp_path)
    assert sum(call[0] == "train" for call in fake.calls) == 4  # the others ran all the same
    fake.calls = []
    finished = execute(tmp_path, seeds=3)  # and one may join
    assert len(finished) == 6
    assert [fake_train.option(call, "seed") for call in fake.calls] == ["1", "3", "3"]
    assert ["--resume" in call for call in fake.calls] == [True, False, False]


def test_a_folder_with_a_run_of_other_values_is_refused(tmp_path: Path, fake: FakeRuns) -> None:
    execute(tmp_path, seeds=1)
    execute(tmp_path, "--timeouts.startup_seconds", "50", seeds=1)
    with pytest.raises(ConfigError, match="schedule.steps 40 -> 39"):
        execute(tmp_path, "--schedule.steps", "39", seeds=1)
    assert len(fake.calls) == 3


@pytest.mark.parametrize(
    ("budget", "ended", "steps"),
    [
        ({"tokens": 1500}, "tokens", 15),
        ({"minutes": 1.0}, "minutes", 20),
        ({"tokens": 1500, "minutes": 1.0}, "tokens", 15),
        ({}, "steps", STEPS),
    ],
)
def test_a_run_ends_at_its_budget_and_goes_on_with_a_larger_one(
    tmp_path: Path, fake: FakeRuns, budget: dict[str, Any], ended: str, steps: int
) -> None:
    (run,) = execute(tmp_path, seeds=1, runs=[{"recipe": "grpo"}], budget=budget)
    assert (run.ended_by(), run.steps_done()) == (ended, steps)
    (run,) = execute(tmp_path, seeds=1, runs=[{"recipe": "grpo"}])
    assert (run.ended_by(), run.steps_done()) == ("steps", STEPS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": [{"recipe": "scale"}]}, "run scale: recipe is 'scale': no such recipe"),
        ({"runs": [{"recipe": "grpo"}, {"recipe": "grpo"}]}, "['grpo/seed-1', 'grpo/seed-2']"),
        ({"runs": ["grpo"]}, "runs is ['grpo'], not a list of mappings"),
        ({"runs": [{"recipe": "grpo", "schedule.step": 3}]}, "schedule.step: unknown key"),
        ({"seed": 3}, "unknown keys ['seed']"),
        ({"budget": {"hours": 3}}, "budget has ['hours']; it can have tokens, minutes, device_h"),
        ({"config": None}, "config is missing"),
        ({"runs": [{"recipe": "grpo", "published": "x"}]}, "published has ['x']"),
    ],
)
def test_invalid_studies_are_refused_before_anything_starts(
    tmp_path: Path, fake: FakeRuns, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as e:
        execute(tmp_path, **changes)
    assert message in str(e.value)
    assert fake.calls == []


def test_runs_are_fitted_and_compared_with_the_published_ones(
    tmp_path: Path, fake: FakeRuns
) -> None:
    fake.slower = "grpo"
    paper = {"A": 0.61, "B": 1.92, "B_at_shared_A": 2.01}
    finished = execute(tmp_path, runs=[{"recipe": "scalerl", "paper": paper}, {"recipe": "grpo"}])
    written = study_results.write(finished, tmp_path, "mean")
    assert written == json.loads((tmp_path / "comparison.json").read_text())
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    results = written["results"]
    assert list(results) == ["scalerl", "grpo", *(run.name for run in finished)]
    # Both seeds lie on one sigmoid: the fit recovers its Cmid, as far as 7 points allow.
    assert results["scalerl"]["runs"] == 2
    assert results["scalerl"]["fit"]["Cmid"]["value"] == pytest.approx(1000, rel=0.2)
    assert results["grpo"]["fit"]["Cmid"]["value"] == pytest.approx(2000, rel=0.3)
    assert results["scalerl"]["first"] == pytest.approx(0.303, abs=1e-6)
    # The margin is measured over the seeds, and all runs are compared at the mean of their A.
    values = {name: r["fit"]["A"]["value"] for name, r in results.items()}
    of_grpo = [values["grpo/seed-1"], values["grpo/seed-2"]]
    assert written["seeds"]["grpo"]["A"] == of_grpo
    spreads = [each["spread"] for each in written["seeds"].values()]
    assert spreads[1] == pytest.approx(abs(of_grpo[0] - of_grpo[1]) / 2)
    assert written["margin"] == max(0.02, *spreads) == written["comparison"]["margin"]
    mean = (values["scalerl"] + values["grpo"]) / 2
    assert written["comparison"]["shared_a"] == pytest.approx(mean)
    table = (tmp_path / "comparison.md").read_text()
    assert "| scalerl | 2 | steps | 80 | 8,000 | 4.0 | 0.303 -> " in table
    assert "| 0.610 | 1.92 | - | 2.01 |" in table
    assert "| grpo/seed-2 | 1 | steps | 40 | 4,000 | 2.0 |" in table
    (pair,) = written["comparison"]["pairs"]
    assert f"- {pair['better']} over {pair['other']}: {pair['verdict']}" in table


def test_published_results_of_the_presets_are_those_of_the_paper(tmp_path: Path) -> None:
    table = {row["series"]: row for row in published_table().values()}
    entries = [run.entry for name in study_file.PRESETS for run in study_file.load(name, {}).runs()]
    named = [entry for entry in entries if entry.get("published")]
    assert len(named) == 13
    for entry in named:
        assert published(entry["published"]).points.compute[-1] > 3000
        row = table.get(entry["published"], {})
        # Figure 2 prints another B for ScaleRL than Table 1.
        keys = {"A", "Cmid"} & {*row, *entry["paper"]} & {*entry["paper"]}
        assert {key: float(row[key]) for key in keys if row} == {
            key: entry["paper"][key] for key in keys if row
        }


def test_device_hours_are_drawn_with_the_published_points(tmp_path: Path, fake: FakeRuns) -> None:
    entries = [{"recipe": "scalerl", "published": "scalerl_8b_bs768_14k"}, {"recipe": "grpo"}]
    finished = execute(
        tmp_path,
        runs=entries,
        values={"schedule.steps": STEPS, "fit.compute": "device_hours"},
    )
    drawn = study_results.write(finished, tmp_path)
    assert drawn["compute"] == "device_hours" and len(drawn["comparison"]["runs"]) == 2
    with_points = (tmp_path / "comparison.png").read_bytes()
    for run in finished:
        run.entry.pop("published", None)
    study_results.write(finished, tmp_path)
    assert (tmp_path / "comparison.png").read_bytes() != with_points


def test_a_single_run_or_a_short_one_has_no_ranking(tmp_path: Path, fake: FakeRuns) -> None:
    finished = execute(tmp_path, runs=[{"recipe": "scalerl"}], seeds=1)
    written = study_results.write(finished, tmp_path)
    assert "error" in written["comparison"] and written["seeds"] == {}
    assert written["results"]["scalerl"]["fit"]["A"]["value"] > 0.5
    assert not (tmp_path / "comparison.png").exists()
    short = execute(tmp_path / "short", seeds=1, budget={"tokens": 500})
    written = study_results.write(short, tmp_path)
    assert "error" in written["results"]["grpo"]["fit"]
    assert "more evaluations" in (tmp_path / "comparison.md").read_text()


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command in this process; return what it prints."""
    with pytest.raises(SystemExit) as e:
        main(list(arguments))
    assert e.value.code == 0
    return capsys.readouterr().out


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Restore the handler that the command replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
def test_a_killed_study_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study(tmp_path, seeds=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stand_in = [sys.executable, "-m", "tests.commands.study.fake_train"]
    monkeypatch.setattr(runs, "COMMAND", stand_in)
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.05)
    command = ("study", "mine.yaml", "--output", "out")
    metrics, called = tmp_path / "out/grpo/seed-1/metrics.jsonl", tmp_path / "called.txt"
    # Each begins at once: the run of the killed one before is still writing its checkpoint.
    for number, calls, status in ((signal.SIGKILL, 3, -signal.SIGKILL), (signal.SIGTERM, 4, 130)):
        process = multiprocessing.get_context("fork").Process(target=main, args=(list(command),))
        process.start()
        deadline = time.monotonic() + 120
        while (
            not metrics.exists()
            or metrics.read_bytes().count(b'"step"') < 10
            or called.read_text().count("\n") < calls
        ):
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.02)
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(60)
        assert process.exitcode == status
    output = printed(capsys, *command)
    assert "[1/2] scalerl/seed-1: ended by steps, 0 s in this call" in output
    assert "[2/2] grpo/seed-1: ended by steps" in output
    lines = called.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["sft", *["train"] * 4]
    assert ["--resume" in line for line in lines] == [False, False, False, True, True]
    steps = [row["step"] for row in read_metrics(metrics) if row["kind"] == "step"]
    assert steps == list(range(STEPS))
    table = (tmp_path / "out/comparison.md").read_text()
    assert table.count("| 1 | steps | 40 |") == 4
    plan = printed(capsys, *command, "--plan")
    assert plan.count("ended by steps") == 2 and "megatron-rl train" not in plan


def test_without_a_study_the_first_option_may_be_the_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = printed(capsys, "ablate", "--optimizer.beta2", "0.9", "--plan")
    assert plan.count("--optimizer.beta2 0.9") == 2


def test_a_call_is_interrupted_once_it_may_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python, like the command itself: a shell cannot trap a SIGINT that it inherited as ignored.
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(print('stopped') or 130))\n"
        "print('up', flush=True)\ntime.sleep(100)\n"
    )
    monkeypatch.setattr(runs, "COMMAND", [sys.executable, "-c", program])
    path = tmp_path / "log.txt"
    with path.open("ab") as log:
        assert runs.call(["train"], log, lambda: "up" in path.read_text()) == 130
    assert path.read_text().split() == ["up", "stopped"]
