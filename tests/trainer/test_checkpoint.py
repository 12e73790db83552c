"""Checkpoints: whole or not there, newest first, refused by name (resuming is in test_layouts)."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.commands.plan.nodes import checkpoint_bytes
from megatron_rl.commands.plan.tensors import count_stages
from megatron_rl.compat import megatron_checkpoint
from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.trainer import checkpoint, checkpoint_folder
from megatron_rl.trainer.model import Policy
from tests.trainer.cases import run_config, save_checkpoint, world_of_one, write_model


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[RunConfig, Policy]]:
    directory = write_model(tmp_path / "hf", "tiny_dense")
    config = run_config(directory, output_dir=tmp_path / "out", checkpoint__keep=2)
    with world_of_one(config):
        yield config, Policy(config, directory)


def names(config: RunConfig) -> list[str]:
    return sorted(p.name for p in checkpoint_folder.folder(config).iterdir())


def resumed(config: RunConfig, resume: bool | int) -> Path | None:
    return checkpoint_folder.resume_from(config.model_copy(update={"resume": resume}), 0)


def test_state_is_written_into_the_same_directory_before_it_counts(
    run: tuple[RunConfig, Policy],
) -> None:
    config, policy = run

    def write_state(step: int, directory: str) -> None:
        assert not checkpoint_folder.find_complete(checkpoint_folder.folder(config))
        assert not (Path(directory) / "trainer.json").exists()
        (Path(directory) / "orchestrator.json").write_text("{}")

    # A model that never stepped can be saved as well.
    path = save_checkpoint(config, policy, 0, write_state)
    assert [path] == checkpoint_folder.find_complete(checkpoint_folder.folder(config))
    assert sorted(p.name for p in path.iterdir()) == ["model", "orchestrator.json", "trainer.json"]
    latest = json.loads((checkpoint_folder.folder(config) / "latest.json").read_text())
    assert latest == {"format": 2, "step": 0, "directory": "step_000000"}
    assert checkpoint.load(config, policy, path) == 0


def test_the_newest_are_kept_and_a_step_can_be_saved_again(run: tuple[RunConfig, Policy]) -> None:
    config, policy = run
    for step in (2, 10, 30, 30):
        save_checkpoint(config, policy, step)
    assert names(config) == ["latest.json", "step_000010", "step_000030"]


def test_steps_of_the_rule_stay_and_a_run_resumes_from_a_chosen_one(
    run: tuple[RunConfig, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, policy = run
    rule = config.checkpoint.model_copy(update={"keep": 1, "keep_every": 20})
    config = config.model_copy(update={"checkpoint": rule})
    for step in (10, 20, 30, 40, 50):
        save_checkpoint(config, policy, step)
    kept = ["step_000020", "step_000040", "step_000050"]
    assert names(config) == ["latest.json", *kept]

    with pytest.raises(ConfigError, match="of step 30; --resume STEP takes another: 20, 40, 50"):
        resumed(config, 30)
    newest = resumed(config, True)
    assert newest is not None and newest.name == "step_000050"
    assert names(config) == ["latest.json", *kept]
    chosen = resumed(config, 20)
    assert chosen is not None and checkpoint.load(config, policy, chosen) == 20
    assert names(config) == ["latest.json", "step_000020"]
    aside = config.output_dir / "checkpoints.old-1"
    assert sorted(p.name for p in aside.iterdir()) == kept[1:]
    latest = json.loads((checkpoint_folder.folder(config) / "latest.json").read_text())
    assert latest["directory"] == "step_000020"
    # Ranks that torchrun restarts with the same command go on from the newest one.
    save_checkpoint(config, policy, 30)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    newest = resumed(config, 20)
    assert newest is not None and newest.name == "step_000030"
    assert names(config) == ["latest.json", "step_000020", "step_000030"]
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert resumed(config, False) is None  # a new run
    assert names(config) == []
    with pytest.raises(ConfigError, match="no complete checkpoint of step 0; start without"):
        resumed(config, 0)


def test_a_failed_state_writer_leaves_the_previous_checkpoint(
    run: tuple[RunConfig, Policy], caplog: pytest.LogCaptureFixture
) -> None:
    config, policy = run
    good = save_checkpoint(config, policy, 1)

    def fails(step: int, directory: str) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(config, policy, 2, fails)
    assert checkpoint_folder.find_complete(checkpoint_folder.folder(config)) == [good]
    assert names(config) == ["latest.json", "step_000001", "step_000002.tmp"]
    (good.parent / ".step_000001.old-0123abcd").mkdir()  # of a replacement that was killed
    for name in (".final.tmp-0123abcd", ".start.tmp-ab_c9x0z"):  # `tempfile` makes the second one
        (config.output_dir / name).mkdir()
    (config.output_dir / ".config.yaml.tmp-0123abcd").touch()
    (config.output_dir / ".mine.tmp-of-others").touch()
    assert resumed(config, True) == good
    assert "step_000002.tmp was left by a save that did not end: removed" in caplog.text
    assert names(config) == ["latest.json", "step_000001"]
    assert sorted(os.listdir(config.output_dir)) == [".mine.tmp-of-others", "checkpoints"]
    save_checkpoint(config, policy, 2)
    assert names(config) == ["latest.json", "step_000001", "step_000002"]


def test_torn_directories_are_passed_over_with_a_warning(
    run: tuple[RunConfig, Policy], caplog: pytest.LogCaptureFixture
) -> None:
    config, policy = run
    good = save_checkpoint(config, policy, 3)
    torn = good.with_name("step_000009")
    shutil.copytree(good, torn)
    (torn / "trainer.json").write_text('{"format": 1, "st')
    good.with_name("step_000010").mkdir()
    assert checkpoint_folder.find_complete(checkpoint_folder.folder(config)) == [good]
    assert "step_000009 is incomplete" in caplog.text
    assert "step_000010 is incomplete" in caplog.text
    assert checkpoint_folder.find_complete(config.output_dir / "nowhere") == []
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoint.load(config, policy, torn)


def test_another_format_is_refused(run: tuple[RunConfig, Policy]) -> None:
    config, policy = run
    path = save_checkpoint(config, policy, 3)
    about = json.loads((path / "trainer.json").read_text())
    (path / "trainer.json").write_text(json.dumps({**about, "format": 3}))
    with pytest.raises(ValueError, match="has format 3: this program reads 2"):
        resumed(config, True)
    with pytest.raises(ValueError, match="has format 3: this program reads 2"):
        checkpoint.load(config, policy, path)


def test_a_layout_with_another_kind_of_optimizer_is_refused(
    run: tuple[RunConfig, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, policy = run
    layout = checkpoint._layout(config)
    monkeypatch.setattr(checkpoint, "_layout", lambda config: {**layout, "world_size": 2})
    path = save_checkpoint(config, policy, 3)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has a sharded optimizer and cannot be resumed with an"):
        checkpoint.load(config, policy, path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model/__0_0.distcp", "model/.metadata", "state.msgpack"])
@pytest.mark.parametrize(
    ("damaging", "seen"),
    [
        (cut, r"it has [\d,]+ of [\d,]+ bytes"),
        (Path.unlink, "No such file or directory"),
        (flip, "its bytes were changed after it was written"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_newest_whole_one_is_used(
    run: tuple[RunConfig, Policy],
    caplog: pytest.LogCaptureFixture,
    name: str,
    damaging: Callable[[Path], None],
    seen: str,
) -> None:
    config, policy = run

    def write_state(step: int, directory: str) -> None:
        (Path(directory) / "state.msgpack").write_bytes(bytes(range(100)))

    whole, newest = (save_checkpoint(config, policy, step, write_state) for step in (3, 9))
    damaging(newest / name)
    # The one that is chosen is never another.
    wanted = f"resume is 9: {newest / name}: {seen}.*; --resume STEP takes another: 3"
    with pytest.raises(ConfigError, match=wanted):
        resumed(config, 9)
    assert resumed(config, True) == whole
    (warning,) = caplog.messages
    assert re.fullmatch(f"{newest / name}: {seen}.*: {newest} is damaged and passed over", warning)
    # It is out of the way of the steps that are trained again.
    assert names(config) == ["latest.json", "step_000003"]
    assert (config.output_dir / "checkpoints.old-1" / newest.name).is_dir()


def test_a_changed_list_of_files_does_not_count(
    run: tuple[RunConfig, Policy], caplog: pytest.LogCaptureFixture
) -> None:
    config, policy = run
    whole, newest = (save_checkpoint(config, policy, step) for step in (3, 9))
    about = newest / "trainer.json"
    text = about.read_text()
    about.write_text(text.replace('"step": 9', '"step": 8'))
    assert text != about.read_text()
    assert resumed(config, True) == whole
    assert "step_000009 is incomplete (no readable trainer.json)" in caplog.text


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let every disk have so many free bytes."""
    usage = SimpleNamespace(free=num_bytes)
    monkeypatch.setattr(checkpoint_folder.shutil, "disk_usage", lambda path: usage)


def test_a_run_that_the_disk_cannot_hold_stops_before_its_first_step(
    run: tuple[RunConfig, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, policy = run
    path = save_checkpoint(config, policy, 1)
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    size -= (path / "trainer.json").stat().st_size
    free(monkeypatch, 2 * size)
    checkpoint.Saver(config, policy).close()  # one is there, of keep = 2 and the next one
    free(monkeypatch, 2 * size - 1)
    wanted = (
        rf"{path.parent}: checkpoint.keep = 2 and the next one: 2 checkpoints need {2 * size:,}"
        rf" bytes, and {2 * size - 1:,} are free; .* free some space, lower checkpoint.keep, or"
        r" take another disk \(output_dir\), and go on with --resume"
    )
    with pytest.raises(ConfigError, match=wanted):
        checkpoint.Saver(config, policy)


def test_the_size_of_a_first_checkpoint_is_known_before_it(run: tuple[RunConfig, Policy]) -> None:
    config, policy = run
    size = checkpoint.tensor_bytes(config, policy)
    saver = checkpoint.Saver(config, policy)
    path = saver.save(1)
    saver.wait()
    saver.close()
    planned = checkpoint_bytes(config, count_stages(policy.architecture, config.parallel), 0)
    assert saver._memory.nbytes == pytest.approx(planned, rel=0.01)
    data = sum(p.stat().st_size for p in path.rglob("*.distcp"))
    assert size <= data <= 1.1 * size  # with the headers of small tensors


def test_a_save_without_room_writes_nothing(
    run: tuple[RunConfig, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, policy = run
    saver = checkpoint.Saver(config, policy)
    path = saver.save(1)
    saver.wait()
    free(monkeypatch, 10_000)
    wanted = r"the next checkpoint needs [\d,]+ bytes, and 10,000 are free; nothing was written"
    with pytest.raises(ConfigError, match=wanted):
        saver.save(2)
    saver.close()
    assert resumed(config, True) == path


def test_a_disk_that_fills_during_a_save_is_named_and_the_torn_one_is_removed(
    run: tuple[RunConfig, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, policy = run
    saver = checkpoint.Saver(config, policy)
    saver.save(1)
    saver.wait()

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() > 1000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    monkeypatch.setattr(filesystem_async, "open", Full, raising=False)
    saver.save(2)
    with pytest.raises(checkpoint.SaveError) as error:
        saver.wait()
    assert re.search(
        r"checkpoint of step 2: rank 0: DiskFull: .*No space left on device: .*step_000002.tmp:"
        " free some space there, and start it again",
        str(error.value),
    )
    saver.close()
    assert names(config) == ["latest.json", "step_000001"]


def test_training_goes_on_while_a_checkpoint_is_written(
    run: tuple[RunConfig, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are of the moment of `save`, however late they are written."""
    config, policy = run
    may_write = threading.Event()
    write = megatron_checkpoint.Save.write

    def late(save: megatron_checkpoint.Save) -> Any:
        assert may_write.wait(60)
        return write(save)

    monkeypatch.setattr(megatron_checkpoint.Save, "write", late)
    saver = checkpoint.Saver(config, policy)
    before = {name: p.detach().clone() for name, p in policy.parameters.items()}
    path = saver.save(1)
    assert not path.exists()
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(1.0)
    may_write.set()
    saver.wait()  # nothing of the trainer's thread is needed for it
    saver.close()
    assert checkpoint.load(config, policy, path) == 1
    assert all(policy.parameters[name].equal(value) for name, value in before.items())


def test_random_state_is_restored_where_only_the_computation_differs(
    run: tuple[RunConfig, Policy],
) -> None:
    config, policy = run
    torch.manual_seed(5)
    path = save_checkpoint(config, policy, 3)
    expected = torch.rand(3)
    parallel = config.parallel.model_copy(update={"recompute": "full", "overlap_grad_reduce": True})
    checkpoint.load(config.model_copy(update={"parallel": parallel}), policy, path)
    assert torch.rand(3).equal(expected)
