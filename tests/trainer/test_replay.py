"""A recorded run trained again from its rollout files: the same weights bit for bit, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from megatron_rl import cli, launch, train
from megatron_rl import messages as m
from megatron_rl.config import ConfigError, RunConfig, save_config
from megatron_rl.data import Prompt
from megatron_rl.data.prompt_format import save_tiny_tokenizer
from megatron_rl.data.question import Question
from megatron_rl.metrics import read_metrics
from megatron_rl.metrics.rollouts import read_rollouts
from megatron_rl.orchestrator.batching import build_batch
from megatron_rl.orchestrator.groups import Group
from megatron_rl.orchestrator.recording import Recorder
from megatron_rl.orchestrator.replay import plan_replay, recorded_batch
from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.trainer.model import Policy
from tests.segments import segments
from tests.trainer.cases import ODD_VOCABULARY, run_config, world_of_one, write_model
from tests.trainer.replay_worker import LAYOUTS
from tests.workers import run_ranks

STEPS, SAVED, GROUPS, SIZE = 4, 2, 3, 4
rng = np.random.default_rng(3)
QUESTION = Question("", "exact", "", "1")
PROMPTS = [
    Prompt(i, f"p{i}", rng.integers(0, ODD_VOCABULARY, 3 + i).tolist(), QUESTION, "sums")
    for i in range(STEPS * GROUPS)
]


def sample(step: int, group: int, index: int) -> m.Sample:
    """Return random tokens of two versions, in a third each with forced ones and of two turns."""
    n = int(rng.integers(4, 9))
    older, origins = max(step - 1, 0), segments(n, (1, 3) if index % 3 == 2 else (0, 0))
    if turns := index % 3 == 1:
        kinds: list[m.Origin] = ["sampled", "given", "sampled"]
        origins = [m.Segment(k, *r) for k, r in zip(kinds, ((0, 1), (1, 3), (3, n)), strict=True)]
    return m.Sample(
        group=group, index=index, prompt_id=group, evaluation=-1,
        token_ids=m.int_bytes(rng.integers(0, ODD_VOCABULARY, n)),
        logprobs=m.float_bytes(rng.normal(-3.4, 0.3, n)),
        segments=origins, turn_rewards=[0.5, -0.25] if turns else [],
        spans=[m.VersionSpan(older, 0, 2), m.VersionSpan(step, 2, n)],
        finish_reason="length" if index == 3 else "stop",
    )  # fmt: skip


def groups_of(step: int) -> list[Group]:
    """Return the groups of a step; all rewards of the last one are equal, so it is dropped."""
    groups = []
    for number in range(step * GROUPS, (step + 1) * GROUPS):
        group = Group(number, number, SIZE, "sums")
        for i in range(SIZE):
            right = number % GROUPS == GROUPS - 1 or (i + number) % 3 == 0
            group.samples[i] = sample(step, number, i)
            group.verdicts[i] = Verdict(Outcome.CORRECT if right else Outcome.WRONG, "")
        groups.append(group)
    return groups


class RecordedOrchestrator:
    """Builds batches of random completions and records them as an orchestrator does."""

    def __init__(self, config: RunConfig) -> None:
        self.recorder = Recorder(config, lambda ids: " ".join(map(str, ids)))
        self.algorithm, self.batches = config.algorithm, list[m.Batch]()

    def next_batch(self, step: int) -> m.Batch:
        if step == STEPS:
            return m.Batch(step=step, stop=True)
        groups, ids = groups_of(step), {p.id: p.token_ids for p in PROMPTS}
        built = build_batch(step, groups, ids, self.algorithm, probe=1, save=step == SAVED)
        self.recorder.batch(step, groups, built, PROMPTS)
        self.batches.append(built.batch)
        return built.batch

    def step_done(self, done: m.StepDone, wait_seconds: float) -> None:
        self.recorder.trained(done)

    def save_state(self, step: int, directory: str) -> None:
        pass

    def send(self, message: m.Message) -> None:
        self.recorder.close()


def recorded(folder: Path, model: str) -> tuple[Path, list[m.Batch]]:
    """Return the folder of a run with a start checkpoint, and its batches."""
    directory = write_model(folder.with_name("hf"), model)
    save_tiny_tokenizer(directory)
    config = run_config(
        directory,
        output_dir=folder,
        algorithm__credit="turn",
        metrics__max_logprob_error=1e6,  # the log-probs are random
        checkpoint__every_steps=SAVED,
        roles__generator_ranks=1,
        optimizer__eps=1e-4,  # so that Adam doesn't enlarge rounding where gradients are near 0
        generation__thinking_budget_tokens=[8, 8],
        generation__answer_budget_tokens=8,
        generation__max_prompt_tokens=16,
    )
    save_config(config)
    client: Any = RecordedOrchestrator(config)
    with world_of_one(config):
        train.train_loop(config, Policy(config, directory), client, None, 0, lambda: False)
    return folder, client.batches


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[m.Batch]]:
    return recorded(tmp_path_factory.mktemp("recorded") / "run", "tiny_dense")


def replayed(run: Path, output: Path, steps: str | None = None, *more: str) -> bytes:
    """Return the final weights of a replay in this process."""
    plan = plan_replay(run, steps, ["--output_dir", str(output), *more])
    assert plan.config.roles.world_size == 1
    with world_of_one(plan.config):
        train._replay(plan, 0, Path(plan.config.model), lambda: False)
    return weights(output)


def weights(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


def trained_steps(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "step"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changed(run: Path, copy: Path, column: str) -> Path:
    """Return a copy of a run with one other value in the first trained completion of step 1."""
    shutil.copytree(run, copy)
    path = copy / "rollouts" / "step_000001.parquet"
    table = read_rollouts(path)
    rows = table.to_pylist()
    values = next(row for row in rows if row["trained"])[column]
    values[-1] = (values[-1] + 1) % ODD_VOCABULARY if column == "token_ids" else values[-1] - 0.01
    parquet.write_table(type(table).from_pylist(rows, schema=table.schema), path)
    return copy


def test_the_batches_are_those_of_the_run(run: tuple[Path, list[m.Batch]]) -> None:
    assert len(run[1]) == STEPS
    for batch in run[1]:
        again = recorded_batch(run[0] / "rollouts", batch.step, save=batch.save)
        assert again == msgspec.structs.replace(batch, probe=[])


def test_the_files_have_ratio_and_entropy_of_each_trained_token(
    run: tuple[Path, list[m.Batch]],
) -> None:
    model = AutoModelForCausalLM.from_pretrained(run[0].with_name("hf"))
    rows = read_rollouts(run[0] / "rollouts" / "step_000000.parquet").to_pylist()
    assert [row["ratios"] is not None for row in rows] == [row["trained"] for row in rows]
    for row in (row for row in rows if row["trained"]):
        ids, first = row["prompt_token_ids"] + row["token_ids"], len(row["prompt_token_ids"]) - 1
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, first:-1].double()
        policy = torch.log_softmax(logits, -1)
        new = policy.gather(1, torch.tensor(row["token_ids"])[:, None])[:, 0].numpy()
        ratios = np.exp(new - np.array(row["logprobs"]))
        ratios[np.array(row["origins"]) > 0] = np.nan
        assert row["ratios"] == pytest.approx(ratios.tolist(), rel=2.5e-4, nan_ok=True)
        entropies = -(policy.exp() * policy).sum(-1)
        assert row["entropies"] == pytest.approx(entropies.tolist(), rel=2.5e-4)
    later = read_rollouts(run[0] / "rollouts" / f"step_{STEPS - 1:06d}.parquet", ["ratios"])
    assert later["ratios"].null_count < len(later)


def test_a_replay_ends_with_the_weights_of_the_run_and_leaves_its_folder(
    run: tuple[Path, list[m.Batch]], tmp_path: Path
) -> None:
    before = contents(run[0])
    assert replayed(run[0], tmp_path / "again") == weights(run[0])
    assert [row["step"] for row in trained_steps(tmp_path / "again")] == list(range(STEPS))
    assert trained_steps(tmp_path / "again")[0]["logprob_error_tokens"] > 0
    assert (tmp_path / "again" / "checkpoints" / f"step_{SAVED:06d}").is_dir()
    part = f"{SAVED}-{STEPS - 1}"
    assert replayed(run[0], tmp_path / "part", part) == weights(run[0])
    assert [row["step"] for row in trained_steps(tmp_path / "part")] == [2, 3]
    assert replayed(run[0], tmp_path / "one", "0-1") != weights(run[0])
    assert replayed(run[0], tmp_path / "one", None, "--resume") == weights(run[0])
    assert contents(run[0]) == before


def test_other_layouts_end_with_the_same_weights_but_for_rounding(tmp_path: Path) -> None:
    folder, _ = recorded(tmp_path / "run", "tiny_scout")
    own, start = load(weights(folder)), load_file(tmp_path / "hf" / "model.safetensors")
    run_ranks("tests.trainer.replay_worker", 2, tmp_path, 240)
    for name in LAYOUTS:
        found = load(weights(tmp_path / name))
        assert found.keys() == own.keys()
        assert max(float((found[k] - own[k]).abs().max()) for k in own) <= 1e-6, name
        assert max(float((found[k] - start[k]).abs().max()) for k in own) > 1e-3


@pytest.mark.parametrize("column", ["token_ids", "logprobs"])
def test_another_token_or_log_prob_gives_other_weights(
    run: tuple[Path, list[m.Batch]], tmp_path: Path, column: str
) -> None:
    other = changed(run[0], tmp_path / "run", column)
    assert replayed(other, tmp_path / "again") != weights(run[0])


def test_log_probs_of_another_model_are_refused_before_the_first_update(
    run: tuple[Path, list[m.Batch]], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"step 0: .*differ by .* nats"):
        replayed(run[0], tmp_path / "again", None, "--metrics.max_logprob_error", "1e-3")
    assert not trained_steps(tmp_path / "again")


def test_what_cannot_be_replayed_is_refused(
    run: tuple[Path, list[m.Batch]], tmp_path: Path
) -> None:
    folder, own = run[0], ["--output_dir", str(tmp_path / "again")]

    def refused(match: str, steps: str | None = None, *more: str, run: Path = folder) -> None:
        with pytest.raises(ConfigError, match=match):
            plan_replay(run, steps, [*own, *more])

    refused(r"config\.yaml: no such configuration file", run=tmp_path)
    refused("in the folder of the run itself", None, "--output_dir", str(folder))
    refused("in the folder of the run itself", None, "--output_dir", str(folder / "rollouts"))
    refused("no files of 2 of the steps 3-5: 4, 5; the run has not trained them", "3-5")
    for text in ("x", "3-", "-3", "1-2-3", "3-2"):
        refused("write the first and the last step as 3-7", text)
    refused("step_000003 is no complete checkpoint; the run has step_000002, step_000004:", "3-3")
    refused("no routed experts: with --algorithm.routing_replay none", None,
        "--algorithm.routing_replay", "replay")  # fmt: skip
    phases = ["--schedule.mode", "ppo_off_policy", "--schedule.updates_per_phase", "2"]
    phases += ["--schedule.max_lag_steps", "1"]
    phases += ["--algorithm.loss", "gspo", "--algorithm.old_policy", "trainer"]
    refused("step 3 needs log-probs under the weights of step 2", "3-3", *phases)
    reference = ["--algorithm.kl_coefficient", "0.1", "--algorithm.kl_reset_steps", "2"]
    refused("step 3 needs log-probs under the weights of step 2", "3-3", *reference)
    copy = shutil.copytree(folder, tmp_path / "run")
    (copy / "rollouts" / "step_000000.parquet").unlink()
    refused("no files of 1 of the steps 0-3: 0; .*rollouts_gib", run=copy)
    shutil.rmtree(copy / "rollouts")
    refused("no files of 1 of the steps 0-0: 0; the run has not trained them", run=copy)
    refused("in the folder of the run itself", None, "--output_dir", str(folder), run=copy)


def test_the_command_starts_the_trainer_ranks_alone(
    run: tuple[Path, list[m.Batch]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    class Replaced(Exception):
        pass

    def exec_torchrun(*given: Any) -> None:
        raise Replaced(*given)

    monkeypatch.setattr(launch, "torchrun_for", lambda needed, *_, **__: [str(needed)])
    monkeypatch.setattr(launch, "exec_torchrun", exec_torchrun)
    given = ["train", "--replay", str(run[0]), "--steps", "0-1"]
    options = ["--output_dir", str(tmp_path / "again")]
    with pytest.raises(Replaced) as seen:
        cli.app([*given, *options], standalone_mode=False)
    assert seen.value.args == (["1"], [*given, *options], 3)
    cli.app([*given, *options, "--plan"], standalone_mode=False)
    assert "ranks 0" in capsys.readouterr().out
    for wrong in (["--steps", "0-1"], [*given[1:], "--config", "x"], [*given[1:], "--dry-run"]):
        with pytest.raises(ConfigError, match="--replay"):
            cli.app(["train", *wrong, *options], standalone_mode=False)
    assert not (tmp_path / "again").exists()
