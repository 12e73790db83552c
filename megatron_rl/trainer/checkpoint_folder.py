"""The folder of a run's checkpoints: which are whole, where a run goes on, and their space.

    step_000020/        a checkpoint (`models.run_checkpoint`)
    latest.json         {"format": 2, "step": 20, "directory": "step_000020"}

All files are written into `step_000020.tmp`, which is then renamed; `latest.json` is replaced after
the rename. Recovery: the newest directory counts whose files are all as `trainer.json` says
(`resume_from`), or the one of a step that is chosen; newer ones are moved to `checkpoints.old-<n>`,
damaged ones as well. A `.tmp` directory was torn by a crash, and is removed when the next run
starts.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.files import left_in, naming_full_disk, replace_file, replace_folder
from megatron_rl.models import run_checkpoint
from megatron_rl.models.run_checkpoint import find_complete, read_about, step_of, steps
from megatron_rl.trainer import world

LATEST = "latest.json"
_log = logging.getLogger(__name__)


def folder(config: RunConfig) -> Path:
    """Return the folder of a run's checkpoints."""
    return config.output_dir / "checkpoints"


def put_in_place(
    work: Path, step: int, layout: dict[str, Any], files: dict[str, tuple[int, str]]
) -> None:
    """Make a written `.tmp` directory the newest checkpoint, with the sums of all its files."""
    run_checkpoint.complete(work, step, layout, files)
    final = work.with_suffix("")
    replace_folder(work, final)
    _point_to(final)


def _point_to(path: Path) -> None:
    content = {"format": run_checkpoint.FORMAT, "step": step_of(path), "directory": path.name}
    replace_file(path.with_name(LATEST), json.dumps(content, indent=2))


def resume_from(config: RunConfig, rank: int) -> Path | None:
    """Return the checkpoint to resume from; collective over the trainer ranks.

    Without `resume`, an older run's are moved aside; with a step, those after it. Ranks that
    torchrun restarted (`--max-restarts`) resume from the newest one. Of each, all files are checked
    first; a damaged one that was not chosen is passed over, with a warning that names the file.

    Raises:
        ConfigError: there is none that `resume` asks for, or it is damaged.
    """
    root = folder(config)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if rank == 0:
        for path in [*root.glob("step_*.tmp"), *left_in(root), *left_in(config.output_dir)]:
            _log.warning("%s was left by a save that did not end: removed", path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    complete = _of_rank_0(find_complete(root) if rank == 0 else [])
    if config.resume is not False or restarted:
        newest = restarted or config.resume is True
        for path in complete:
            if not newest and step_of(path) != config.resume:
                continue
            problem = find_damage(path)
            if problem is None:
                newer = [p for p in steps(root) if step_of(p) > step_of(path)]
                dist.barrier(group=world.control_group())  # all ranks have read the folder
                if rank == 0 and newer:
                    _move_aside(root, newer)
                    _point_to(path)
                dist.barrier(group=world.control_group())
                return path
            if not newest:
                others = [p for p in complete if p != path]
                raise ConfigError(f"resume is {config.resume}: {problem}; {_choices(others)}")
            if rank == 0:
                _log.warning("%s: %s is damaged and passed over", problem, path)
        if not restarted:
            which = "" if config.resume is True else f" of step {config.resume}"
            whole = [] if newest else complete
            raise ConfigError(
                f"resume is {config.resume}: {root} holds no complete checkpoint{which};"
                f" {_choices(whole)}"
            )
    dist.barrier(group=world.control_group())
    if rank == 0 and root.exists():
        _move_aside(root, root.iterdir())
    dist.barrier(group=world.control_group())
    return None


def _choices(paths: list[Path]) -> str:
    others = ", ".join(str(step_of(p)) for p in reversed(paths))
    return f"--resume STEP takes another: {others}" if others else "start without --resume"


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a complete checkpoint, in one line; None for a whole one.

    Each trainer rank reads its share of the files; collective over them.
    """
    own = sorted(read_about(path)["files"])[dist.get_rank() :: dist.get_world_size()]
    by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    problems = run_checkpoint.problems(path, own)
    dist.all_gather_object(by_rank, problems, group=world.control_group())
    return run_checkpoint.first_of([line for part in by_rank for line in part])


def check_space(config: RunConfig, size: int, reserve: bool = False) -> None:
    """Refuse to begin what would fill the disk; collective over the trainer ranks.

    `size` is that of the next checkpoint in bytes. With `reserve`, `checkpoint.keep` checkpoints
    must fit and the next one, which is complete before an older one is removed.

    Raises:
        ConfigError: they don't fit.
    """
    root, problem = folder(config), None
    if dist.get_rank() == 0:
        with naming_full_disk(root):
            root.mkdir(parents=True, exist_ok=True)
        keep, here = config.checkpoint.keep, find_complete(root)
        number = max(1, keep + 1 - len(here)) if reserve else 1
        size = max(
            [size, *map(run_checkpoint.num_bytes, here[:1])]
        )  # that one has the orchestrator's state, too
        free = shutil.disk_usage(root).free
        if free < number * size:
            next_ones = "the next checkpoint needs"
            if number > 1:
                next_ones = f"checkpoint.keep = {keep} and the next one: {number} checkpoints need"
            problem = (
                f"{root}: {next_ones} {number * size:,} bytes, and {free:,} are free; nothing was"
                " written: free some space, lower checkpoint.keep, or take another disk"
                " (output_dir), and go on with --resume"
            )
    if (problem := _of_rank_0(problem)) is not None:
        raise ConfigError(problem)


def remove_old(config: RunConfig) -> None:
    """Remove the checkpoints that `checkpoint.keep` and `checkpoint.keep_every` don't keep."""
    c = config.checkpoint
    for path in find_complete(folder(config))[c.keep :]:
        if c.keep_every and step_of(path) % c.keep_every == 0:
            continue
        # First: a directory without it is incomplete, should the removal be interrupted.
        (path / run_checkpoint.ABOUT).unlink()
        shutil.rmtree(path)


def _move_aside(root: Path, paths: Iterable[Path]) -> None:
    n = 1
    while (aside := root.with_name(f"{root.name}.old-{n}")).exists():
        n += 1
    for path in list(paths):
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)


def _of_rank_0[Value](value: Value) -> Value:
    values = [value]
    dist.broadcast_object_list(values, group=world.control_group())
    return values[0]
