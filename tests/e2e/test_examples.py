"""The example from end to end: torchrun, Megatron, vLLM, in-flight swaps, interrupt, resume, fit.

Both models run small: a short supervised stage and 32 steps. What a full run reaches is the demo's
to show; here its parts have to fit together.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_rl.metrics import METRICS, read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/scalerl_tiny.sh"
STEPS, KILL_AT, INTERRUPT_AT = 32, 11, 20
SAVED_EVERY = 8
DROPPED = "metrics.dropped-0.jsonl"
"""What a run had measured that goes on from an older checkpoint."""
SMALL = [
    *("--schedule.steps", str(STEPS)),
    *("--sft.steps", "240"),
    *("--task.heldout_prompts", "16"),
    *("--evaluation.samples_per_prompt", "4"),
    *("--evaluation.points", "4"),
    *("--metrics.logprob_check_every_steps", "2"),
    *("--checkpoint.every_steps", str(SAVED_EVERY)),
    *("--metrics.terminal", "plain"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def environment() -> dict[str, str]:
    """The interpreter's own scripts first: `torchrun` must be this environment's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT
        )


def finish(process: subprocess.Popen[bytes], log: Path, seconds: float = 400) -> None:
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        pytest.fail(f"no end after {seconds} s:\n{log.read_text()[-6000:]}")
    assert status == 0, log.read_text()[-6000:]


def steps_done(output: Path) -> int:
    path = output / "metrics.jsonl"
    # The file is there a moment before its first line is.
    if not path.exists() or b"\n" not in path.read_bytes():
        return 0
    return sum(r["kind"] == "step" for r in read_metrics(path))


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    """An uninterrupted run of the dense model, started by the shell; weights travel by gloo."""
    output = tmp_path_factory.mktemp("dense")
    log = output / "log.txt"
    command = ["bash", EXAMPLE, "--model", "tiny_dense", "--output_dir", str(output), *SMALL]
    command += ["--weights.transport", "gloo", "--weights.bucket_bytes", "200000"]
    finish(start(command, log), log)
    return output


@pytest.fixture(scope="module")
def scout(tmp_path_factory) -> Path:
    """A run of the miniature Scout: a rank dies, Ctrl-C interrupts it at step 20, it is resumed.

    It starts with three ranks, which torchrun starts again when one was killed, and is resumed by
    a torchrun with one rank. Routes are compared at first, and replayed from there on.
    """
    output = tmp_path_factory.mktemp("scout")
    log = output / "log.txt"
    arguments = [EXAMPLE, "--output_dir", str(output), *SMALL, "--algorithm.routing_replay"]
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node=3", "--max-restarts=1"]
    process = start([*torchrun, *arguments, "compare"], log)
    deadline = time.monotonic() + 600

    def wait_for(there: Callable[[], bool]) -> None:
        while not there():
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < deadline, log.read_text()[-6000:]
            time.sleep(0.02)

    wait_for(lambda: steps_done(output) >= KILL_AT)
    psutil.Process(process.pid).children()[1].kill()
    wait_for(lambda: (output / DROPPED).exists())
    wait_for(lambda: steps_done(output) >= INTERRUPT_AT)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    interrupted = steps_done(output)
    assert INTERRUPT_AT <= interrupted < STEPS, f"{interrupted} steps when it ended"
    (output / "interrupted_at.txt").write_text(str(interrupted))
    finish(start([*TORCHRUN, "--standalone", *arguments, "replay", "--resume"], log), log)
    return output


def rows(output: Path, kind: str) -> list[dict]:
    return [row for row in read_metrics(output / "metrics.jsonl") if row["kind"] == kind]


@pytest.mark.parametrize("run", ["dense", "scout"])
def test_every_step_is_trained_once_within_the_lag_bound_and_nothing_is_aborted(run, request):
    steps = rows(request.getfixturevalue(run), "step")
    assert [row["step"] for row in steps] == list(range(STEPS))
    assert max(row["lag_max"] for row in steps) <= 8
    assert steps[-1]["aborted_requests"] == 0


@pytest.mark.parametrize("run", ["dense", "scout"])
def test_weights_are_swapped_while_completions_are_decoding(run, request):
    steps = rows(request.getfixturevalue(run), "step")
    long = sum(row["completions_long"] for row in steps)
    several = sum(row["multi_version_fraction_long"] * row["completions_long"] for row in steps)
    assert long > 100
    assert several / long > 0.1


@pytest.mark.parametrize("run", ["dense", "scout"])
def test_trainer_and_generator_agree_on_log_probs_under_the_same_weights(run, request):
    checked = [r for r in rows(request.getfixturevalue(run), "step") if "logprob_error_max" in r]
    assert sum(row["logprob_error_tokens"] for row in checked) > 500
    assert max(row["logprob_error_max"] for row in checked) < 1e-4
    assert max(row["step"] for row in checked) > 8


@pytest.mark.parametrize("run", ["dense", "scout"])
def test_the_run_ends_with_evaluations_a_summary_a_fit_and_a_model(run, request):
    output = request.getfixturevalue(run)
    evaluated = [row["step"] for row in rows(output, "eval")]
    assert evaluated == sorted(set(evaluated)) and evaluated[0] == 0 and evaluated[-1] == STEPS
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == STEPS and not summary["run"]["interrupted"]
    assert {"rl", "evaluation"} <= set(summary["wall_seconds"])
    assert summary["pass_rate"]["last"]["step"] == STEPS
    # Two tasks, two curves.
    assert set(summary["tasks"]) == {"sums", "products"}
    for task in summary["tasks"].values():
        assert task["pass_rate"]["last"]["step"] == STEPS
        assert task["fit"]["points"] == len(evaluated)
    assert (output / "final" / "model.safetensors").stat().st_size > 0
    assert (output / "final" / "tokenizer.json").exists()


@pytest.mark.parametrize("run", ["dense", "scout"])
def test_every_metric_has_a_documented_meaning(run, request):
    names = {n for row in read_metrics(request.getfixturevalue(run) / "metrics.jsonl") for n in row}
    assert names <= set(METRICS)


def test_an_interrupted_and_resumed_run_trains_the_same_prompts_as_one_that_was_not(dense, scout):
    # Data order depends on seed and task alone, so the other model's run is the reference.
    def prompts(output: Path) -> Counter[int]:
        return Counter(p for row in rows(output, "step") for p in row["prompt_ids"])

    assert prompts(scout) == prompts(dense)
    assert sum(prompts(scout).values()) == STEPS * 16


def test_after_a_rank_was_killed_the_run_goes_on_from_the_newest_checkpoint(scout):
    again = [json.loads(line) for line in (scout / DROPPED).read_text().splitlines()]
    dropped = [row["step"] for row in again if row["kind"] == "step"]
    assert dropped[:3] == [SAVED_EVERY, SAVED_EVERY + 1, SAVED_EVERY + 2]
    prompts = {row["step"]: row["prompt_ids"] for row in rows(scout, "step")}
    assert all(row["prompt_ids"] == prompts[row["step"]] for row in again if row["kind"] == "step")


def test_the_curve_of_a_resumed_run_goes_on(scout):
    resumed_at = int((scout / "interrupted_at.txt").read_text())
    steps = rows(scout, "step")
    for name in ("compute_tokens", "compute_device_hours", "wall_seconds"):
        values = [row[name] for row in steps]
        assert values == sorted(values), name
    assert steps[resumed_at]["compute_tokens"] > steps[resumed_at - 1]["compute_tokens"]


def test_replayed_routes_are_those_of_the_generator_where_weights_have_moved_on(scout):
    resumed_at = int((scout / "interrupted_at.txt").read_text())
    steps = rows(scout, "step")
    compared, replayed = steps[:resumed_at], steps[resumed_at:]
    live = [row["routes_differing_live_fraction"] for row in steps]
    print(f"routes that differ by staleness: mean {sum(live) / len(live):.4f}, max {max(live):.4f}")
    assert [row["routes_differing_fraction"] for row in compared] == live[:resumed_at]
    assert all(row["routes_differing_fraction"] == 0.0 for row in replayed)
    # Tokens are up to 8 steps old: the trainer's own routers have moved.
    assert max(live[:resumed_at]) > 0 and max(live[resumed_at:]) > 0


def test_the_end_is_a_model_that_transformers_loads(scout):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(scout / "final", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.model_type == "llama4_text"


def test_evaluate_reproduces_the_runs_last_evaluation_from_its_checkpoint(dense, tmp_path):
    result, rows_file, points = (tmp_path / n for n in ("o.json", "o.jsonl", "points.jsonl"))
    command = [sys.executable, "-m", "megatron_rl.cli", "evaluate", str(dense), "--samples", "16"]
    command += ["--json", str(result), "--jsonl", str(rows_file), "--fit", str(points)]
    log = tmp_path / "log.txt"
    finish(start(command, log), log)
    found = json.loads(result.read_text())
    last = rows(dense, "eval")[-1]
    assert found["step"] == last["step"] == STEPS
    assert found["compute"]["compute_tokens"] == last["compute_tokens"]
    parts = last.get("tasks") or {"": last}
    assert sum(s["num_prompts"] for s in found["sets"]) == last["num_prompts"]
    assert len(found["sets"]) == len(parts)
    assert all("run_evaluation" in s for s in found["sets"])
    # Two independent samples of the same model: within 4 of their common standard errors.
    correct = sum(s["verdicts"].get("correct", 0) for s in found["sets"])
    rate, total = correct / (16 * last["num_prompts"]), 16 * last["num_prompts"]
    error = math.hypot(last["pass_rate_stderr"], math.sqrt(max(rate, 1 / total) / total))
    assert abs(rate - last["pass_rate"]) < 4 * error
    completions = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert len(completions) == 16 * last["num_prompts"]
    assert len(points.read_text().splitlines()) == len(parts)
