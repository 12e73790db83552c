"""Megatron's own `pretrain` with the plug-in: the commands of docs/pretraining.md, as they stand.

One script (examples/pretrain_gpt.py) pretrains a mixture of experts on one rank, then does RL from
its checkpoint over two pipeline stages with a live generator. Ctrl-C interrupts the RL part; it is
resumed on one rank, with the model from a provider function in place of a model configuration.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.commands.doctor.script import PretrainingScript
from tests.e2e.processes import ROOT, finish, hide, rows, start, steps_done

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

PAGE = (ROOT / "docs" / "pretraining.md").read_text()
EXAMPLE = "examples/pretrain_gpt.py"
PRETRAINING, INTERRUPT_AT, STEPS = 15, 2, 12
WORDS = 32
"""Of the tokenizer; Megatron's vocabulary has 128 rows."""
MAIN = """
 from megatron.core.enums import ModelType
 from megatron.training import pretrain
 from megatron.training.argument_utils import pretrain_cfg_container_from_args
 from megatron.training.arguments import parse_and_validate_args
 if __name__ == "__main__":"""
"""What the diffs of the page leave out."""


def blocks(language: str) -> list[str]:
    """Return the page's blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def shell() -> tuple[str, list[str]]:
    """Return (the settings, the commands) of the page's last shell block."""
    *_, text = blocks("bash")
    settings, _, commands = text.partition("\n\n")
    lines = commands.replace("\\\n", " ").splitlines()
    return settings, [line for line in lines if not line.startswith("#")]


@dataclass(frozen=True)
class Run:
    """What the commands left behind."""

    folder: Path
    pretraining: str
    first: str
    second: str
    interrupted_at: int

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return rows(self.folder / "runs/rl", kind)


def interrupt(process: Any, output: Path, log: Path) -> int:
    """Send Ctrl-C's signal after a few steps; return the number of steps at the end."""
    deadline = time.monotonic() + 420
    while steps_done(output) < INTERRUPT_AT:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    return steps_done(output)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("pretraining")
    (folder / "examples").symlink_to(ROOT / "examples")
    for text in [*blocks("yaml"), *blocks("python")]:
        (folder / text.partition("\n")[0].removeprefix("# ")).write_text(text)
    settings, (prepare, pretrain, first, second, convert) = shell()
    tokens = ",".join(map(str, range(STEPS)))
    more = f" metrics.token_dump_steps=[{tokens}]"  # continues --rl-set
    settings = settings.replace("routing_replay=compare", f"routing_replay=compare{more}")

    def started(command: str, log: str) -> Any:
        # The shell gives way to torchrun, which gets the signals.
        script = f"cd {folder}; {settings}\nexec {command}"
        return start(["bash", "-c", script], folder / log)

    def finished(command: str, log: str) -> str:
        return finish(started(command, log), folder / log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        hidden = hide(folder / "hidden", "modelopt", "wandb")
        patch.setenv("PYTHONPATH", f"{hidden}{os.pathsep}{ROOT}")
        patch.chdir(folder)
        runpy.run_path(prepare.split()[1])
        pretraining = finished(pretrain, "pretraining.log")
        process = started(f"{first} --model-from config", "first.log")
        interrupted_at = interrupt(process, folder / "runs/rl", folder / "first.log")
        second = finished(f"{second} --model-from provider", "second.log")
        saved = convert.replace(f"{STEPS:07d}", f"{interrupted_at:07d}")
        result = CliRunner().invoke(app, saved.split()[1:])
        assert result.exit_code == 0, result.output
    first = (folder / "first.log").read_text()
    return Run(folder, pretraining, first, second, interrupted_at)


def logged(log: str, name: str) -> dict[int, float]:
    pattern = rf"iteration +(\d+)/.*?{name}: ([-+.0-9E]+)"
    return {int(i): float(v) for i, v in re.findall(pattern, log)}


def test_pretraining_learns_and_the_plugin_takes_no_part(run: Run) -> None:
    losses = logged(run.pretraining, "lm loss")
    assert max(losses) == PRETRAINING
    assert losses[PRETRAINING] < 0.8 * losses[2]


def test_ctrl_c_saves_a_checkpoint_from_which_the_run_continues(run: Run) -> None:
    assert INTERRUPT_AT <= run.interrupted_at < STEPS
    saved = {path.name for path in (run.folder / "trained").glob("iter_*")}
    assert saved == {f"iter_{step:07d}" for step in (run.interrupted_at, STEPS)}
    first, second = logged(run.first, "grad norm"), logged(run.second, "grad norm")
    assert [*first, *second] == list(range(1, STEPS + 1))
    assert max(first) == run.interrupted_at
    assert all(norm > 0 for norm in [*first.values(), *second.values()])
    assert [row["step"] for row in run.rows("step")] == list(range(STEPS))
    assert {0, 5, 10, STEPS} <= {row["step"] for row in run.rows("eval")}


def test_the_generator_samples_from_the_trained_weights(run: Run) -> None:
    steps = run.rows("step")
    checked = {row["step"]: row["logprob_error_max"] for row in steps if "logprob_error_max" in row}
    assert min(checked) == 0 and max(checked) >= run.interrupted_at
    assert max(checked.values()) < 1e-4
    # The routers of the trainer are the generator's under the same weights only.
    differing = [row["routes_differing_fraction"] for row in steps]
    assert differing[0] == 0.0 < max(differing)


def test_the_reward_is_that_of_the_own_function(run: Run) -> None:
    rewards = [row["reward_mean"] for row in run.rows("step")]
    assert all(-0.09 < reward <= 1.0 for reward in rewards)
    assert any(reward not in (0.0, 1.0, -1.0) for reward in rewards)


def test_the_exported_checkpoint_is_the_model_that_was_trained(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from megatron_rl.config import load_config
    from megatron_rl.data import load_prompts
    from megatron_rl.data.prompt_format import read_format

    monkeypatch.chdir(run.folder)
    config = load_config(run.folder / "runs/rl/config.yaml")
    tokenizer = Tokenizer.from_file(str(run.folder / "hf/tokenizer.json"))
    form = read_format(run.folder / "hf", config.generation.think_start)
    prompts = {p.id: p.token_ids for p in load_prompts(config, tokenizer, form).train}
    model = AutoModelForCausalLM.from_pretrained(run.folder / "exported")
    assert model.get_output_embeddings().weight.shape[0] == WORDS

    def error(step: int) -> float:
        """Return the largest difference from the trainer's log-probs in a step."""
        dumps = (run.folder / "runs/rl/tokens").glob(f"{step}-*.npy")
        tokens = np.concatenate([np.load(path) for path in dumps])
        tokens = np.sort(tokens, order=["prompt_id", "completion", "position"])
        starts = np.flatnonzero(tokens["position"] == 0)
        assert len(starts) > 8
        errors = []
        for part in np.split(tokens, starts[1:]):
            assert list(part["position"]) == list(range(len(part)))
            prompt, ids = prompts[part["prompt_id"][0]], part["token"].tolist()
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1)[range(len(ids)), ids].numpy()
            errors.append(abs(logprobs - part["trainer_logprob"]).max())
        return float(max(errors))

    # The step after Ctrl-C is computed with the weights that it saved.
    assert error(run.interrupted_at) < 1e-4
    assert error(run.interrupted_at + 1) > 1e-3


def test_the_documented_lines_are_those_that_the_doctor_writes() -> None:
    diffs = blocks("diff")
    assert len(diffs) == 2
    for diff in diffs:
        diff = diff.replace("@@ imports\n", "").replace("@@ __main__", MAIN)
        plain, changed = (
            "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] != sign)
            for sign in "+-"
        )
        assert PretrainingScript(plain, Path("pretrain_gpt.py")).changed() == changed
    example = (ROOT / EXAMPLE).read_text()
    assert PretrainingScript(example, Path(EXAMPLE)).changed() == example
