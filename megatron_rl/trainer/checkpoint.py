"""Checkpoints of a run: Megatron's distributed checkpoint and the orchestrator's state.

On disk, below `output_dir/checkpoints`:

    step_000020/
      model/            megatron.core.dist_checkpointing: parameters, optimizer, random state
      ...               files of the state writer (the orchestrator), written in between
      trainer.json      {"format": 1, "step": 20, ...}: written last, so its directory is complete
    latest.json         {"format": 1, "step": 20, "directory": "step_000020"}

All files are written into `step_000020.tmp`, which is then renamed; `latest.json` is replaced
after the rename. Recovery: the newest directory with a `trainer.json` counts (`resume_from`), or
the one of a step that is chosen, which moves newer ones to `checkpoints.old-<n>`; a
`.tmp` directory or one without it was torn by a crash and is skipped with a warning. Each rank
writes and reads its own shards, one tensor at a time; the format reshards over tensor, pipeline,
context and data parallelism.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_rl import liveness
from megatron_rl.compat import megatron_checkpoint
from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.files import replace_file, replace_folder
from megatron_rl.trainer import world
from megatron_rl.trainer.model import Policy

FORMAT = 1
FOLDER = "checkpoints"
StateWriter = Callable[[int, str], None]
_log = logging.getLogger(__name__)


def folder(config: RunConfig) -> Path:
    """Return the folder of a run's checkpoints."""
    return config.output_dir / FOLDER


def save(
    config: RunConfig, policy: Policy, step: int, write_state: StateWriter | None = None
) -> Path:
    """Write the checkpoint after `step` optimizer steps; collective over the trainer ranks.

    `write_state` adds files: it is called on rank 0 with the step and the temporary directory. If
    it raises, no checkpoint is left behind. Returns the finished directory; an older one of the
    same step was replaced.
    """
    liveness.sign("saving", step)
    final = folder(config) / f"step_{step:06d}"
    work = final.with_suffix(".tmp")
    group, first = world.control_group(), dist.get_rank() == 0
    if first:
        shutil.rmtree(work, ignore_errors=True)
        (work / "model").mkdir(parents=True)
    dist.barrier(group=group)
    megatron_checkpoint.save(_sharded_state(policy, is_loading=False), work / "model", group)
    if first:
        if write_state is not None:
            write_state(step, str(work))
        _write_json(work / "trainer.json", {"step": step, "layout": _layout(config)})
        replace_folder(work, final)
        _write_json(folder(config) / "latest.json", {"step": step, "directory": final.name})
        _remove_old(config)
    dist.barrier(group=group)
    return final


def load(config: RunConfig, policy: Policy, directory: str | Path) -> int:
    """Restore parameters, optimizer and random state; collective over the trainer ranks.

    The parallel layout may differ from that of the finished checkpoint `directory`, except in the
    number of expert-parallel ranks and in whether the optimizer is sharded. Returns the optimizer
    steps that made the weights.

    Raises:
        FileNotFoundError: no complete checkpoint.
        ValueError: a checkpoint that this program or this layout cannot read.
    """
    path = Path(directory)
    about = _read_json(path / "trainer.json")
    if about is None:
        raise FileNotFoundError(
            f"{path} has no readable trainer.json: it is no complete checkpoint; name another, or"
            " remove it and resume from the newest"
        )
    if about.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {about.get('format')!r}: this program reads {FORMAT}; use the"
            " release that wrote it"
        )
    layout, now = about["layout"], _layout(config)
    _check_layout(path, layout, now, policy.architecture.experts > 0)
    same_world = all(layout[key] == size for key, size in now.items())
    template = _sharded_state(policy, is_loading=True, random_state=same_world)
    state = dist_checkpointing.load(template, str(path / "model"))
    dist.barrier(group=world.control_group())  # NCCL would not wait as long for a slow reader
    _load_modules(policy, state)
    policy.optimizer.load_state_dict(state["optimizer"])
    if same_world:
        torch.set_rng_state(state["random_state"])
    return int(about["step"])


def load_weights(policy: Policy, directory: str | Path) -> None:
    """Restore the parameters alone, into any layout; collective over the trainer ranks.

    The directory is the one with `.metadata`: `release` of a checkpoint that `megatron-rl convert`
    made, or `model` of a run's.
    """
    _load_modules(policy, dist_checkpointing.load(_sharded_modules(policy), str(directory)))
    policy.optimizer.reload_model_params()


def resume_from(config: RunConfig, rank: int) -> Path | None:
    """Return the checkpoint to resume from; collective over the trainer ranks.

    Without `resume`, an older run's are moved aside; with a step, those after it. Ranks that
    torchrun restarted (`--max-restarts`) resume from the newest one.

    Raises:
        ConfigError: `resume` is set and there is none, or not the one of this step.
    """
    root = folder(config)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if config.resume is not False or restarted:
        complete = find_complete(root)
        newest = restarted or config.resume is True
        path = next((p for p in complete if newest or _step(p) == config.resume), None)
        if path is not None:
            dist.barrier()  # all ranks have read the folder
            if rank == 0 and path != complete[0]:
                _move_aside(root, complete[: complete.index(path)])
                _write_json(root / "latest.json", {"step": _step(path), "directory": path.name})
            dist.barrier()
            return path
        if not restarted:
            steps = ", ".join(str(_step(p)) for p in reversed(complete))
            remedy = f"it has those of steps {steps}" if steps else "start without --resume"
            which = "" if config.resume is True else f" of step {config.resume}"
            raise ConfigError(
                f"resume is {config.resume}: {root} holds no complete checkpoint{which}; {remedy}"
            )
    if rank == 0 and root.exists():
        _move_aside(root, root.iterdir())
    dist.barrier()
    return None


def _move_aside(root: Path, paths: Iterable[Path]) -> None:
    n = 1
    while (aside := root.with_name(f"{root.name}.old-{n}")).exists():
        n += 1
    for path in list(paths):
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)


def _layout(config: RunConfig) -> dict[str, Any]:
    """Return the sizes that say which rank has what."""
    in_any_layout = {"recompute", "overlap_grad_reduce", "overlap_param_gather"}
    sizes = config.parallel.model_dump(exclude=in_any_layout)
    return {"world_size": dist.get_world_size(), **sizes}


def _check_layout(path: Path, old: dict[str, Any], new: dict[str, Any], experts: bool) -> None:
    if experts and old["expert"] != new["expert"]:
        raise ValueError(
            f"{path} was written with parallel.expert = {old['expert']} and cannot be resumed with"
            f" {new['expert']}: Megatron does not reshard optimizer state over experts; keep it"
        )
    kinds = {True: "a sharded optimizer", False: "an unsharded optimizer"}
    before, after = (
        layout["distributed_optimizer"]
        and layout["world_size"] > layout["tensor"] * layout["pipeline"]
        for layout in (old, new)
    )
    if before != after:
        raise ValueError(
            f"{path} has {kinds[before]} and cannot be resumed with {kinds[after]}: it is sharded"
            " under parallel.distributed_optimizer with data or context parallelism; keep these"
        )


def _layout_metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded_state(
    policy: Policy, *, is_loading: bool, random_state: bool = True
) -> dict[str, Any]:
    model = _sharded_modules(policy)
    # Megatron's optimizer takes the entries of a single chunk, or all of several chunks.
    entries = model if len(model) > 1 else model["model"]
    megatron_checkpoint.shard_optimizer(policy.optimizer)
    options = {"is_loading": is_loading, "metadata": _layout_metadata()}
    state = {**model, "optimizer": policy.optimizer.sharded_state_dict(entries, **options)}
    if random_state:
        state["random_state"] = ShardedObject(
            "random_state", torch.get_rng_state(), (dist.get_world_size(),), (dist.get_rank(),)
        )
    return state


def _modules(policy: Policy) -> dict[str, torch.nn.Module]:
    single = len(policy.modules) == 1
    return {"model" if single else f"model{i}": m for i, m in enumerate(policy.modules)}


def _sharded_modules(policy: Policy) -> dict[str, Any]:
    metadata = _layout_metadata()
    return {k: m.sharded_state_dict(metadata=metadata) for k, m in _modules(policy).items()}


def _load_modules(policy: Policy, state: dict[str, Any]) -> None:
    for key, module in _modules(policy).items():
        module.load_state_dict(state[key], strict=False)


def find_complete(directory: Path) -> list[Path]:
    """Return the complete checkpoints below a `checkpoints` folder, newest first."""
    complete = []
    for path in directory.glob("step_*"):
        if path.suffix == ".tmp":
            _log.warning("%s was left by a save that did not end: skipped", path)
        elif not path.is_dir() or not path.name.removeprefix("step_").isdigit():
            continue
        elif _read_json(path / "trainer.json") is None:
            _log.warning("%s is incomplete (no readable trainer.json): skipped", path)
        else:
            complete.append(path)
    return sorted(complete, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _remove_old(config: RunConfig) -> None:
    c = config.checkpoint
    for path in find_complete(folder(config))[c.keep :]:
        if c.keep_every and _step(path) % c.keep_every == 0:
            continue
        # First: a directory without it is incomplete, should the removal be interrupted.
        (path / "trainer.json").unlink()
        shutil.rmtree(path)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, json.dumps({"format": FORMAT, **content}, indent=2))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
