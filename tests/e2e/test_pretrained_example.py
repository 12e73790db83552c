"""Four steps of `examples/scalerl_smollm.sh`: a pretrained model, its SFT stage, RL, its end.

The example's own settings with small sizes. Two operands and a short supervised stage leave answers
of which some are right and some wrong. A lag of one step makes the engine load every version.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.data.arithmetic import WORDS
from megatron_rl.data.question import BOX_INSTRUCTION
from tests.e2e.processes import finish, hide, rows, start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS, LAG, PROMPTS, COMPLETIONS, HELD_OUT = 4, 1, 3, 4, 2
# Two threads would wait for each other on cores that others use.
SETTINGS = f"""
  --roles.trainer_threads 1
  --schedule.steps {STEPS} --schedule.max_lag_steps {LAG}
  --schedule.prompts_per_step {PROMPTS} --schedule.completions_per_prompt {COMPLETIONS}
  --task.operand_weights [1.0] --task.train_prompts 100 --task.heldout_prompts {HELD_OUT}
  --sft.steps 4 --sft.prompts 80 --sft.tokens_per_step 300 --sft.warmup_steps 1
  --generation.answer_budget_tokens 32 --generation.concurrent_completions 16
  --generation.kv_cache_gib 0.1
  --evaluation.every_steps {STEPS} --evaluation.samples_per_prompt 1
  --metrics.logprob_check_every_steps 1 --metrics.terminal plain
""".split()


@pytest.fixture(scope="module")
def run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of the finished run; its gigabytes go when the tests are done."""
    folder = tmp_path_factory.mktemp("pretrained")
    output, log = folder / "run", folder / "log.txt"
    command = ["bash", "examples/scalerl_smollm.sh", "--model", str(smollm2), *SETTINGS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", hide(folder / "hidden", "wandb"))
        finish(start([*command, "--output_dir", str(output)], log), log, seconds=600)
    yield output
    shutil.rmtree(folder)


def completions(run: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows of a file of completions."""
    found: list[dict[str, Any]] = pq.read_table(run / "rollouts" / f"{name}.parquet").to_pylist()
    return found


def right_answer(prompt: str) -> int:
    """Return the value of the expression in words that a prompt asks for."""
    values = {word: str(sign) for sign, word in WORDS.items()}
    match = re.search(r"What is (.*?)\?", prompt)
    assert match is not None, prompt
    return int(eval("".join(values[word] for word in match[1].split())))


def test_every_step_is_trained_on_completions_of_the_weights_that_the_engine_was_given(run):
    steps = rows(run, "step")
    assert [row["step"] for row in steps] == list(range(STEPS))
    assert all(row["grad_norm"] > 0 for row in steps)
    for step, row in enumerate(steps):
        batch = completions(run, f"step_{step:06d}")
        assert len(batch) == PROMPTS * COMPLETIONS * (1 + row["empty_batches"])
        versions = {version for completion in batch for version in completion["versions"]}
        assert versions <= set(range(max(0, step - LAG), step + 1)), step
    last = completions(run, f"eval_{STEPS:06d}")
    assert len(last) == HELD_OUT
    assert {version for row in last for version in row["versions"]} == {STEPS}


def test_trainer_and_generator_agree_on_log_probs_under_the_same_weights(run):
    # A step without tokens of its own weights whose scores came in time has no comparison.
    checked = [row for row in rows(run, "step") if "logprob_error_max" in row]
    errors = {
        row["step"]: (row["logprob_error_tokens"], row["logprob_error_max"]) for row in checked
    }
    print(errors)
    assert sum(tokens for tokens, _ in errors.values()) > 50
    assert max(error for _, error in errors.values()) < 1e-4
    assert max(errors) > 0  # weights that traveled to the engine during the run


def test_the_verifier_rewards_right_answers_and_punishes_wrong_ones(run):
    names = [*(f"step_{step:06d}" for step in range(STEPS)), f"eval_{STEPS:06d}"]
    judged = []
    for row in (row for name in names for row in completions(run, name)):
        boxes = re.findall(r"\\boxed\{(-?\d+)\}", row["completion"])
        if len(boxes) == 1:
            judged.append(
                (row["reward"], 1.0 if int(boxes[0]) == right_answer(row["prompt"]) else -1.0)
            )
    print(len(judged), judged.count((1.0, 1.0)))
    assert {given for given, _ in judged} == {1.0, -1.0}
    assert [pair for pair in judged if pair[0] != pair[1]] == []


def test_the_final_model_answers_in_transformers(run, smollm2):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(run / "final", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    before, after = (load_file(f / "model.safetensors") for f in (smollm2, run / "final"))
    assert before.keys() == after.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    chat = [{"role": "user", "content": f"What is three plus four? {BOX_INSTRUCTION}"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    text = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])
    print(text)
    assert re.search(r"\\boxed\{.+\}<\|im_end\|>$", text), text
