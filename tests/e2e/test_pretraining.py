"""Megatron's own `pretrain`, before and with the plug-in: pretraining, then RL from its checkpoint.

One script (examples/extend_pretraining.py) does both, on a mixture of experts under tensor,
sequence and expert parallelism, with a live generator; the RL part is stopped and resumed.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.metrics import read_metrics

# Three runs of Megatron, each of which imports for 15 s, are made once for all tests.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
PRETRAINING, STOP_AT, STEPS = 30, 10, 20
# The sizes of the model `tiny_qwen3_moe`; then what a machine without a GPU needs.
MODEL = """
  --num-layers 3 --hidden-size 64 --num-attention-heads 2 --kv-channels 32 --ffn-hidden-size 192
  --num-experts 4 --moe-ffn-hidden-size 96 --moe-router-topk 2 --moe-router-dtype fp32
  --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall --qk-layernorm
  --max-position-embeddings 256 --position-embedding-type rope --rotary-base 1000
  --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
  --make-vocab-size-divisible-by 16 --tokenizer-type HuggingFaceTokenizer
"""
TRAINING = """
  --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2
  --expert-tensor-parallel-size 1 --seq-length 64 --micro-batch-size 8 --global-batch-size 32
  --min-lr 0 --lr-decay-style constant --weight-decay 0 --clip-grad 1.0 --log-interval 1
  --eval-interval 10 --eval-iters 0 --num-workers 0 --calculate-per-token-loss
"""
CPU = """
  --transformer-impl local --distributed-backend gloo --no-rope-fusion --no-persist-layer-norm
  --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
  --no-bias-dropout-fusion --use-cpu-initialization
"""
RL = """
output_dir: {output}
model: {model}
task: {{train_prompts: 400, heldout_prompts: 8}}
schedule: {{prompts_per_step: 4, completions_per_prompt: 8, micro_batch_tokens: 2048}}
generation:
  max_prompt_tokens: 16
  thinking_budget_tokens: [28, 28]
  answer_budget_tokens: 8
  interruption_phrase: </think>
  concurrent_completions: 32
  kv_cache_gib: 0.25
# 30 steps of pretraining answer nothing: what is rewarded here are short completions.
algorithm:
  zero_variance_filter: false
  length_penalty: all
  length_max_tokens: 36
  length_cache_tokens: 32
  routing_replay: compare
verifier: {{values: {{no_answer: -1.0}}}}
evaluation: {{samples_per_prompt: 4}}
metrics: {{terminal: plain, logprob_check_every_steps: 1}}
fit: {{compute: tokens}}
"""


def megatron(ranks: int, arguments: list[str], log: Path, seconds: float = 420) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "megatron_rl.compat.megatron_cpu"]
    command += ["examples/extend_pretraining.py", *f"{MODEL}{TRAINING}{CPU}".split(), *arguments]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
            pytest.fail(f"no end after {seconds} s:\n{log.read_text()[-6000:]}")
    assert status == 0, log.read_text()[-6000:]
    return log.read_text()


def write_demonstrations(path: Path) -> None:
    from megatron_rl.data.prompts import demonstrations

    config = load_config(ROOT / "examples/scalerl_tiny.yaml", ["--sft.prompts", "500"])
    rows = [{"prompt": p, "completion": c} for p, c in demonstrations(config)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | Path]:
    from megatron_rl.data.prompt_format import save_tiny_tokenizer
    from megatron_rl.models import tiny

    folder = tmp_path_factory.mktemp("pretraining")
    tiny.create("tiny_qwen3_moe", folder / "model", save_tiny_tokenizer)
    (folder / "model" / "model.safetensors").unlink()  # the weights are Megatron's
    write_demonstrations(folder / "examples.jsonl")
    shared = ["--tokenizer-model", str(folder / "model"), "--lr", "1e-3"]
    pretrained = [
        *("--train-iters", str(PRETRAINING), "--examples", str(folder / "examples.jsonl")),
        *("--save", str(folder / "pretrained"), "--save-interval", str(PRETRAINING)),
    ]
    found: dict[str, str | Path] = {"folder": folder}
    found["pretraining"] = megatron(2, [*shared, *pretrained], folder / "pretraining.log")
    (folder / "rl.yaml").write_text(RL.format(output=folder / "rl", model=folder / "model"))
    reinforcement = [
        *shared,
        *("--rl-config", str(folder / "rl.yaml"), "--train-iters", str(STEPS)),
        *("--save", str(folder / "trained"), "--save-interval", "5"),
    ]
    start = ["--load", str(folder / "pretrained"), "--finetune", "--no-load-optim"]
    first = [*reinforcement, *start, "--no-load-rng", "--exit-interval", str(STOP_AT)]
    found["first"] = megatron(3, first, folder / "first.log")
    again = [*reinforcement, "--load", str(folder / "trained")]
    found["second"] = megatron(3, again, folder / "second.log")
    return found


def logged(log: str | Path, name: str) -> dict[int, float]:
    pattern = rf"iteration +(\d+)/.*?{name}: ([-+.0-9E]+)"
    return {int(i): float(v) for i, v in re.findall(pattern, str(log))}


def test_pretraining_learns_and_the_plugin_takes_no_part(run: dict[str, str | Path]) -> None:
    losses = logged(run["pretraining"], "lm loss")
    assert max(losses) == PRETRAINING
    assert losses[PRETRAINING] < 0.8 * losses[2]


def test_reinforcement_goes_on_where_it_was_stopped(run: dict[str, str | Path]) -> None:
    first, second = logged(run["first"], "grad norm"), logged(run["second"], "grad norm")
    assert (max(first), min(second), max(second)) == (STOP_AT, STOP_AT + 1, STEPS)
    rows = read_metrics(Path(run["folder"]) / "rl" / "metrics.jsonl")
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    assert steps == list(range(STEPS))
    evaluated = {row["step"] for row in rows if row["kind"] == "eval"}
    assert {0, STOP_AT, STEPS} <= evaluated


def test_every_step_has_a_loss_and_a_gradient(run: dict[str, str | Path]) -> None:
    rows = read_metrics(Path(run["folder"]) / "rl" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if row["kind"] == "step"]
    norms = [*logged(run["first"], "grad norm").values()]
    norms += logged(run["second"], "grad norm").values()
    assert len(losses) == len(norms) == STEPS
    assert all(loss != 0 for loss in losses)
    assert all(norm > 0 for norm in norms)


def test_the_generator_samples_from_the_trained_weights(run: dict[str, str | Path]) -> None:
    rows = read_metrics(Path(run["folder"]) / "rl" / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "step"]
    checked = [row["logprob_error_max"] for row in steps if "logprob_error_max" in row]
    assert checked
    assert max(checked) < 1e-4
    # Routers of all tensor-parallel ranks are compared: they agree under the same weights alone.
    differing = [row["routes_differing_fraction"] for row in steps]
    assert differing[0] == 0.0 < max(differing)


def test_the_scripts_differ_by_few_lines() -> None:
    plain, extended = (
        ast.unparse(_without_docstring(ROOT / "examples" / name)).splitlines()
        for name in ("pretrain_gpt.py", "extend_pretraining.py")
    )
    changed = [
        line for line in difflib.unified_diff(plain, extended, n=0) if re.match(r"[+-][^+-]", line)
    ]
    assert 0 < len(changed) <= 15, changed


def _without_docstring(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text())
    tree.body = tree.body[1:]
    return tree
