"""Checkpoints: whole or not there, newest first, refused by name (resuming is in test_layouts)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.model import Policy
from tests.trainer.cases import run_config, world_of_one, write_model


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[RunConfig, Policy]]:
    directory = write_model(tmp_path / "hf", "tiny_dense")
    config = run_config(directory, output_dir=tmp_path / "out", checkpoint__keep=2)
    with world_of_one(config):
        yield config, Policy(config, directory)


def names(config: RunConfig) -> list[str]:
    return sorted(p.name for p in checkpoint.folder(config).iterdir())


def test_state_is_written_into_the_same_directory_before_it_counts(
    run: tuple[RunConfig, Policy],
) -> None:
    config, policy = run

    def write_state(step: int, directory: str) -> None:
        assert not checkpoint.find_complete(checkpoint.folder(config))
        assert not (Path(directory) / "trainer.json").exists()
        (Path(directory) / "orchestrator.json").write_text("{}")

    # A model that never stepped can be saved as well.
    path = checkpoint.save(config, policy, 0, write_state)
    assert [path] == checkpoint.find_complete(checkpoint.folder(config))
    assert sorted(p.name for p in path.iterdir()) == ["model", "orchestrator.json", "trainer.json"]
    latest = json.loads((checkpoint.folder(config) / "latest.json").read_text())
    assert latest == {"format": 1, "step": 0, "directory": "step_000000"}
    assert checkpoint.load(config, policy, path) == 0


def test_the_newest_are_kept_and_a_step_can_be_saved_again(run: tuple[RunConfig, Policy]) -> None:
    config, policy = run
    for step in (2, 10, 30, 30):
        checkpoint.save(config, policy, step)
    assert names(config) == ["latest.json", "step_000010", "step_000030"]


def test_steps_of_the_rule_stay_and_a_run_resumes_from_a_chosen_one(
    run: tuple[RunConfig, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, policy = run
    rule = config.checkpoint.model_copy(update={"keep": 1, "keep_every": 20})
    config = config.model_copy(update={"checkpoint": rule})
    for step in (10, 20, 30, 40, 50):
        checkpoint.save(config, policy, step)
    kept = ["step_000020", "step_000040", "step_000050"]
    assert names(config) == ["latest.json", *kept]

    def resume(value: bool | int) -> Path | None:
        return checkpoint.resume_from(config.model_copy(update={"resume": value}), 0)

    with pytest.raises(ConfigError, match="of step 30; it has those of steps 20, 40, 50"):
        resume(30)
    newest = resume(True)
    assert newest is not None and newest.name == "step_000050"
    assert names(config) == ["latest.json", *kept]
    chosen = resume(20)
    assert chosen is not None and checkpoint.load(config, policy, chosen) == 20
    assert names(config) == ["latest.json", "step_000020"]
    aside = config.output_dir / "checkpoints.old-1"
    assert sorted(p.name for p in aside.iterdir()) == kept[1:]
    latest = json.loads((checkpoint.folder(config) / "latest.json").read_text())
    assert latest["directory"] == "step_000020"
    # Ranks that torchrun restarts with the same command go on from the newest one.
    checkpoint.save(config, policy, 30)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    newest = resume(20)
    assert newest is not None and newest.name == "step_000030"
    assert names(config) == ["latest.json", "step_000020", "step_000030"]
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert resume(False) is None  # a new run
    assert names(config) == []
    with pytest.raises(ConfigError, match="no complete checkpoint of step 0; start without"):
        resume(0)


def test_a_failed_state_writer_leaves_the_previous_checkpoint(
    run: tuple[RunConfig, Policy], caplog: pytest.LogCaptureFixture
) -> None:
    config, policy = run
    good = checkpoint.save(config, policy, 1)

    def fails(step: int, directory: str) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(config, policy, 2, fails)
    assert checkpoint.find_complete(checkpoint.folder(config)) == [good]
    assert "step_000002.tmp was left by a save that did not end" in caplog.text
    checkpoint.save(config, policy, 2)
    assert names(config) == ["latest.json", "step_000001", "step_000002"]


def test_torn_directories_are_passed_over_with_a_warning(
    run: tuple[RunConfig, Policy], caplog: pytest.LogCaptureFixture
) -> None:
    config, policy = run
    good = checkpoint.save(config, policy, 3)
    torn = good.with_name("step_000009")
    shutil.copytree(good, torn)
    (torn / "trainer.json").write_text('{"format": 1, "st')
    good.with_name("step_000010").mkdir()
    assert checkpoint.find_complete(checkpoint.folder(config)) == [good]
    assert "step_000009 is incomplete" in caplog.text
    assert "step_000010 is incomplete" in caplog.text
    assert checkpoint.find_complete(config.output_dir / "nowhere") == []
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoint.load(config, policy, torn)


def test_another_format_is_refused(run: tuple[RunConfig, Policy]) -> None:
    config, policy = run
    path = checkpoint.save(config, policy, 3)
    about = json.loads((path / "trainer.json").read_text())
    (path / "trainer.json").write_text(json.dumps({**about, "format": 2}))
    with pytest.raises(ValueError, match="has format 2: this program reads 1"):
        checkpoint.load(config, policy, path)


def test_a_layout_with_another_kind_of_optimizer_is_refused(run: tuple[RunConfig, Policy]) -> None:
    config, policy = run
    path = checkpoint.save(config, policy, 3)
    about = json.loads((path / "trainer.json").read_text())
    about["layout"]["world_size"] = 2
    (path / "trainer.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="has a sharded optimizer and cannot be resumed with an"):
        checkpoint.load(config, policy, path)


def test_random_state_is_restored_where_only_the_computation_differs(
    run: tuple[RunConfig, Policy],
) -> None:
    config, policy = run
    torch.manual_seed(5)
    path = checkpoint.save(config, policy, 3)
    expected = torch.rand(3)
    parallel = config.parallel.model_copy(update={"recompute": "full", "overlap_grad_reduce": True})
    checkpoint.load(config.model_copy(update={"parallel": parallel}), policy, path)
    assert torch.rand(3).equal(expected)
