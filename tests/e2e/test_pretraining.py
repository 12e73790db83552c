"""Megatron's own `pretrain` with the plug-in: pretraining, then RL from its checkpoint.

One script (examples/extend_pretraining.py) does both, on a mixture of experts under tensor,
sequence and expert parallelism, with a live generator. The RL part is stopped and resumed.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from tests.e2e.processes import ROOT, TORCHRUN, finish, hide, rows, start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

EXAMPLE = "examples/extend_pretraining.py"
PRETRAINING, STOP_AT, STEPS = 30, 5, 10
# The sizes of `tiny_qwen3_moe`. CPU: what a machine without a GPU needs.
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
  --eval-interval 5 --eval-iters 0 --num-workers 0 --calculate-per-token-loss
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
# After 30 steps of pretraining no answer is right: short completions are rewarded instead.
algorithm:
  zero_variance_filter: false
  length_penalty: all
  length_max_tokens: 36
  length_cache_tokens: 32
  routing_replay: compare
evaluation: {{samples_per_prompt: 4}}
metrics: {{terminal: plain, logprob_check_every_steps: 1}}
fit: {{compute: tokens}}
"""


def megatron(ranks: int, arguments: list[str], log: Path) -> str:
    command = [*TORCHRUN, f"--nproc-per-node={ranks}", "-m", "megatron_rl.compat.megatron_cpu"]
    command += [EXAMPLE, *f"{MODEL}{TRAINING}{CPU}".split(), *arguments]
    return finish(start(command, log), log)


def write_demonstrations(path: Path) -> None:
    from megatron_rl.data.prompts import demonstrations

    config = load_config(ROOT / "examples/scalerl_tiny.yaml", ["--sft.prompts", "500"])
    rows = [{"prompt": p, "completion": c} for p, c in demonstrations(config)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | str]:
    """Return the folder of the RL run, and the logs of pretraining and of its two halves."""
    from megatron_rl.data.prompt_format import save_tiny_tokenizer
    from megatron_rl.models import tiny

    folder = tmp_path_factory.mktemp("pretraining")
    tiny.create("tiny_qwen3_moe", folder / "model", save_tiny_tokenizer)
    (folder / "model" / "model.safetensors").unlink()  # the weights are Megatron's
    write_demonstrations(folder / "examples.jsonl")
    (folder / "rl.yaml").write_text(RL.format(output=folder / "rl", model=folder / "model"))
    shared = ["--tokenizer-model", str(folder / "model"), "--lr", "1e-3"]
    pretraining = f"""
      --train-iters {PRETRAINING} --save-interval {PRETRAINING}
      --examples {folder}/examples.jsonl --save {folder}/pretrained
    """.split()
    reinforcement = f"""
      --rl-config {folder}/rl.yaml --train-iters {STEPS} --save {folder}/trained --save-interval 5
    """.split()
    first = f"""
      --load {folder}/pretrained --finetune --no-load-optim --no-load-rng
      --exit-interval {STOP_AT}
    """.split()
    second = ["--load", f"{folder}/trained"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", hide(folder / "hidden", "modelopt", "wandb"))
        return {
            "output": folder / "rl",
            "pretraining": megatron(2, [*shared, *pretraining], folder / "pretraining.log"),
            "first": megatron(3, [*shared, *reinforcement, *first], folder / "first.log"),
            "second": megatron(3, [*shared, *reinforcement, *second], folder / "second.log"),
        }


def logged(log: Path | str, name: str) -> dict[int, float]:
    pattern = rf"iteration +(\d+)/.*?{name}: ([-+.0-9E]+)"
    return {int(i): float(v) for i, v in re.findall(pattern, str(log))}


def test_pretraining_learns_and_the_plugin_takes_no_part(run: dict[str, Path | str]) -> None:
    losses = logged(run["pretraining"], "lm loss")
    assert max(losses) == PRETRAINING
    assert losses[PRETRAINING] < 0.8 * losses[2]


def test_reinforcement_continues_where_it_was_stopped(run: dict[str, Path | str]) -> None:
    first, second = logged(run["first"], "grad norm"), logged(run["second"], "grad norm")
    assert (max(first), min(second), max(second)) == (STOP_AT, STOP_AT + 1, STEPS)
    steps = [row["step"] for row in rows(Path(run["output"]), "step")]
    assert steps == list(range(STEPS))
    evaluated = {row["step"] for row in rows(Path(run["output"]), "eval")}
    assert {0, STOP_AT, STEPS} <= evaluated


def test_every_step_has_a_loss_and_a_gradient(run: dict[str, Path | str]) -> None:
    losses = [row["loss"] for row in rows(Path(run["output"]), "step")]
    norms = [*logged(run["first"], "grad norm").values()]
    norms += logged(run["second"], "grad norm").values()
    assert len(losses) == len(norms) == STEPS
    assert all(loss != 0 for loss in losses)
    assert all(norm > 0 for norm in norms)


def test_the_generator_samples_from_the_trained_weights(run: dict[str, Path | str]) -> None:
    steps = rows(Path(run["output"]), "step")
    checked = [row["logprob_error_max"] for row in steps if "logprob_error_max" in row]
    assert checked
    assert max(checked) < 1e-4
    # The routers of all tensor-parallel ranks agree under the same weights only.
    differing = [row["routes_differing_fraction"] for row in steps]
    assert differing[0] == 0.0 < max(differing)


def test_the_documented_difference_is_all_that_the_plug_in_adds() -> None:
    page = (ROOT / "docs" / "pretraining.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.S)
    plain = (ROOT / EXAMPLE).read_text()
    changed = [line for line in diff.splitlines() if line[:1] in ("+", "-")]
    assert 0 < len([line for line in changed if line[1:].strip()]) <= 15
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = [(line[:1], line[1:] + "\n") for line in hunk.splitlines()]
        extended = "".join(text for sign, text in lines if sign != "-")
        assert plain.count(extended) == 1, extended
        plain = plain.replace(extended, "".join(text for sign, text in lines if sign != "+"))
    code = ast.unparse(ast.parse(plain).body[1:])  # without the docstring
    assert not re.search(r"megatron_rl|megatron_plugin|\brl\b", code)
