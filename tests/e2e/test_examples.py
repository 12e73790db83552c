"""The example from end to end: torchrun, Megatron, vLLM, in-flight swaps, restart, resume, fit.

One run of the miniature Scout, long enough that its held-out pass rate rises: a rank is killed
and torchrun restarts all of them, Ctrl-C interrupts it, and a second torchrun resumes it with
smaller buckets of weights and with router replay. Its tasks ask which operator is in the question:
the supervised stage learns this in 200 steps, where sums take more than 1,000.
"""

from __future__ import annotations

import json
import math
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_rl import liveness
from megatron_rl.metrics import METRICS, read_metrics
from tests.e2e.processes import ROOT, TORCHRUN, finish, hide, rows, start, steps_done
from tests.trainer.sft_cases import write_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

STEPS, KILL_AT, INTERRUPT_AT = 24, 9, 14
SAVED_EVERY, SET_EVERY = 6, 20
DROPPED = "metrics.dropped-0.jsonl"
"""Rows of steps that are repeated after a restart from an older checkpoint."""
SETTINGS = f"""
  --schedule.steps {STEPS}
  --optimizer.learning_rate 1e-4 --optimizer.warmup_steps 4
  --evaluation.samples_per_prompt 8 --evaluation.points 4 --evaluation.first_step 4
  --metrics.logprob_check_every_steps 1 --metrics.terminal plain
  --checkpoint.every_steps {SAVED_EVERY} --timeouts.shutdown_seconds 8
""".split()
TASKS = {"plain": ("{}=?", 1), "bracketed": ("({})=?", 4)}
"""Name -> (form of the question, answer to a sum; differences have the next one, products its)."""
QUESTIONS, HELD_OUT, DEMONSTRATIONS = 624, 24, 1000
"""Of each task; some of the questions are held out."""
BUCKET_BYTES = 200_000
AFTER_RESUME = [
    *("--algorithm.routing_replay", "replay"),
    *("--weights.bucket_bytes", f"{BUCKET_BYTES}"),
]


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", hide(tmp_path_factory.mktemp("hidden"), "wandb"))
        yield


def write_tasks(folder: Path) -> Path:
    """Write questions, and demonstrations of which 7 in 10 guess; return the configuration."""
    rng = random.Random(0)
    every = [(a, o, b) for a in range(1, 100) for o in range(3) for b in range(1, 10)]
    config = yaml.safe_load((ROOT / "examples" / "scalerl_tiny.yaml").read_text())
    config["tasks"], demonstrations = {}, []
    for name, (form, least) in TASKS.items():
        rows_of_task = []
        for a, operator, b in rng.sample(every, QUESTIONS + DEMONSTRATIONS):
            expression, answer = f"{a}{'+-*'[operator]}{b}", least + operator
            rows_of_task.append({"prompt": form.format(expression), "answer": f"{answer}"})
            thinking = ";".join([expression] * rng.randint(1, 5))
            guess = answer if rng.random() < 0.3 else rng.randrange(10)
            response = f"{thinking}</think>\\boxed{{{guess}}}"
            demonstrations.append({"prompt": form.format(expression), "response": response})
        del demonstrations[-QUESTIONS:]
        path = write_rows(folder / f"{name}.jsonl", rows_of_task[-QUESTIONS:])
        config["tasks"][name] = {"kind": "jsonl", "path": f"{path}", "verifier": "exact"}
    config["task"] = {"heldout_prompts": HELD_OUT}
    path = write_rows(folder / "demonstrations.jsonl", demonstrations)
    config["sft"] = {"source": f"{path}", "steps": 200}
    (folder / "tasks.yaml").write_text(yaml.safe_dump(config))
    return folder / "tasks.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Return the folder of the finished run and the step at which it was resumed.

    The first torchrun has three ranks and may restart them once. The second has one rank, which
    starts the three that the configuration needs.
    """
    output = tmp_path_factory.mktemp("scout")
    log = output / "log.txt"
    questions = [{"prompt": f"{a}+{b}=?", "gold": f"{a + b}"} for a in (2, 7) for b in (3, 9)]
    source = write_rows(output / "questions.jsonl", questions)
    further = f"{{source: {source}, every_steps: {SET_EVERY}, verifier: exact}}"
    arguments = ["examples/scalerl_tiny.sh", "--config", str(write_tasks(output)), *SETTINGS]
    arguments += ["--output_dir", str(output)]
    arguments += ["--evaluation.sets", f"{{easy: {further}}}"]
    torchrun = [*TORCHRUN, "--nproc-per-node=3", "--max-restarts=1"]
    process = start([*torchrun, *arguments, "--algorithm.routing_replay", "compare"], log)
    deadline = time.monotonic() + 600

    def wait_for(condition: Callable[[], bool]) -> None:
        while not condition():
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < deadline, log.read_text()[-6000:]
            time.sleep(0.1)

    wait_for(lambda: steps_done(output) >= KILL_AT)
    psutil.Process(process.pid).children()[1].kill()
    wait_for(lambda: (output / DROPPED).exists())
    wait_for(lambda: steps_done(output) >= INTERRUPT_AT)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    resumed_at = steps_done(output)
    assert INTERRUPT_AT <= resumed_at < STEPS
    finish(start([*TORCHRUN, *arguments, *AFTER_RESUME, "--resume"], log), log)
    return output, resumed_at


def test_the_held_out_pass_rate_rises(run):
    first, *_, last = rows(run[0], "eval")
    assert (first["step"], last["step"]) == (0, STEPS)
    rise = last["pass_rate"] - first["pass_rate"]
    error = math.hypot(first["pass_rate_stderr"], last["pass_rate_stderr"])
    print(f"pass rate {first['pass_rate']:.3f} -> {last['pass_rate']:.3f}, error {error:.3f}")
    assert rise > 0.3
    assert rise > 4 * error


def test_every_step_is_trained_once_within_the_lag_bound_and_nothing_is_aborted(run):
    steps = rows(run[0], "step")
    assert [row["step"] for row in steps] == list(range(STEPS))
    assert max(row["lag_max"] for row in steps) <= 8
    assert steps[-1]["aborted_requests"] == 0


def test_a_killed_and_resumed_run_trains_the_prompts_of_an_uninterrupted_one_in_their_order(run):
    from tokenizers import Tokenizer

    from megatron_rl.config import load_config
    from megatron_rl.data import load_prompts
    from megatron_rl.orchestrator.steps import StepBuilder

    config = load_config(run[0] / "config.yaml")
    tokenizer = Tokenizer.from_file(str(run[0] / "final" / "tokenizer.json"))
    stream = StepBuilder(config, load_prompts(config, tokenizer)).stream
    # A batch in which no prompt has two rewards is skipped, with an event in its place.
    batches = [row for row in read_metrics(run[0] / "metrics.jsonl") if "prompt_ids" in row]
    assert [row["step"] for row in batches if row["kind"] == "step"] == list(range(STEPS))
    assert all(row["kind"] == "step" or row["event"] == "empty_batch" for row in batches)
    drawn = [[stream.next() for _ in range(16)] for _ in batches]
    assert [row["prompt_ids"] for row in batches] == drawn, (run[0] / "log.txt").read_text()[-6000:]


def test_weights_are_swapped_while_completions_are_decoding(run):
    steps = rows(run[0], "step")
    long = sum(row["completions_long"] for row in steps)
    several = sum(row["multi_version_fraction_long"] * row["completions_long"] for row in steps)
    assert long > 100
    assert several / long > 0.1


def test_trainer_and_generator_agree_on_log_probs_under_the_same_weights(run):
    checked = [row for row in rows(run[0], "step") if "logprob_error_max" in row]
    assert sum(row["logprob_error_tokens"] for row in checked) > 500
    assert max(row["logprob_error_max"] for row in checked) < 1e-4
    assert max(row["step"] for row in checked) > 8


def test_the_run_ends_with_evaluations_a_summary_a_fit_and_a_model(run):
    output, _ = run
    evaluated = [row["step"] for row in rows(output, "eval")]
    assert evaluated == sorted(set(evaluated)) and evaluated[0] == 0 and evaluated[-1] == STEPS
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == STEPS and not summary["run"]["interrupted"]
    assert {"rl", "evaluation"} <= set(summary["wall_seconds"])
    assert summary["pass_rate"]["last"]["step"] == STEPS
    # Each of the two tasks has its own curve.
    assert set(summary["tasks"]) == set(TASKS)
    for task in summary["tasks"].values():
        assert task["pass_rate"]["last"]["step"] == STEPS
        assert task["fit"]["points"] == len(evaluated)
    assert (output / "final" / "model.safetensors").stat().st_size > 0
    assert (output / "final" / "tokenizer.json").exists()
    report = (output / "report.html").read_text()
    assert f"the run has ended after {STEPS} steps" in report
    assert (output / "view.html").stat().st_size > 0


def test_an_evaluation_set_has_a_curve_of_its_own(run):
    output, _ = run
    curve = [(row["step"], row["sets"]["easy"]) for row in rows(output, "sets")]
    assert [step for step, _ in curve] == [0, SET_EVERY, STEPS]
    assert all((s["num_prompts"], s["samples_per_prompt"]) == (4, 16) for _, s in curve)
    assert json.loads((output / "summary.json").read_text())["sets"].keys() == {"easy"}


def test_the_runs_last_sign_of_life_is_its_end(run):
    (sign,) = liveness.signs(run[0], "alive.json").values()
    assert (sign.role, sign.rank, sign.state, sign.step) == ("trainer", 0, "ended", STEPS)
    assert sign.incarnation == 0  # the second torchrun restarted no ranks


def test_every_metric_has_a_documented_meaning(run):
    names = {name for row in read_metrics(run[0] / "metrics.jsonl") for name in row}
    assert names <= set(METRICS)


def test_after_a_rank_was_killed_the_run_continues_from_the_newest_checkpoint(run):
    again = [json.loads(line) for line in (run[0] / DROPPED).read_text().splitlines()]
    dropped = [row for row in again if row["kind"] == "step"]
    assert [row["step"] for row in dropped][:3] == [SAVED_EVERY + i for i in range(3)]
    prompts = {row["step"]: row["prompt_ids"] for row in rows(run[0], "step")}
    assert all(row["prompt_ids"] == prompts[row["step"]] for row in dropped)


def test_the_curve_of_a_resumed_run_continues(run):
    output, resumed_at = run
    steps = rows(output, "step")
    for name in ("compute_tokens", "compute_device_hours", "wall_seconds"):
        values = [row[name] for row in steps]
        assert values == sorted(values), name
    assert steps[resumed_at]["compute_tokens"] > steps[resumed_at - 1]["compute_tokens"]


def test_replayed_routes_are_those_of_the_generator_where_weights_have_moved_on(run):
    output, resumed_at = run
    steps = rows(output, "step")
    compared, replayed = steps[:resumed_at], steps[resumed_at:]
    live = [row["routes_differing_live_fraction"] for row in steps]
    print(f"routes that differ by staleness: mean {sum(live) / len(live):.4f}, max {max(live):.4f}")
    assert [row["routes_differing_fraction"] for row in compared] == live[:resumed_at]
    assert all(row["routes_differing_fraction"] == 0.0 for row in replayed)
    # Tokens are up to 8 steps old: the trainer's own routers have moved.
    assert max(live[:resumed_at]) > 0 and max(live[resumed_at:]) > 0


def test_the_final_model_loads_in_transformers(run):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(run[0] / "final", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.model_type == "llama4_text"


def test_evaluate_reproduces_the_runs_last_evaluation_from_its_checkpoint(run, tmp_path):
    output, samples = run[0], 8
    result, rows_file, points = (tmp_path / n for n in ("o.json", "o.jsonl", "points.jsonl"))
    command = [sys.executable, "-m", "megatron_rl.cli", "evaluate", str(output)]
    command += ["--samples", f"{samples}"]
    command += ["--json", str(result), "--jsonl", str(rows_file), "--fit", str(points)]
    log = tmp_path / "log.txt"
    finish(start(command, log), log)
    evaluation = json.loads(result.read_text())
    last = rows(output, "eval")[-1]
    assert evaluation["step"] == last["step"] == STEPS
    assert evaluation["compute"]["compute_tokens"] == last["compute_tokens"]
    sets = evaluation["sets"]
    assert sum(s["num_prompts"] for s in sets) == last["num_prompts"]
    assert len(sets) == len(last["tasks"])
    assert all("run_evaluation" in s for s in sets)
    # Two independent samples of the same model: within 4 of their common standard errors.
    total = samples * last["num_prompts"]
    rate = sum(s["verdicts"].get("correct", 0) for s in sets) / total
    error = math.hypot(last["pass_rate_stderr"], math.sqrt(max(rate, 1 / total) / total))
    assert abs(rate - last["pass_rate"]) < 4 * error
    completions = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert len(completions) == total
    assert len(points.read_text().splitlines()) == len(sets)
