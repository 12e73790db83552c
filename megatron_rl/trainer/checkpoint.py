"""Checkpoints of a run: Megatron's distributed checkpoint and the orchestrator's state.

Each rank writes and reads its own shards; the format reshards over tensor, pipeline, context and
data parallelism. Training waits for the copy of a rank's shards to its host's memory; a thread of
each rank writes them, makes their checksums, and completes the checkpoint.
"""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_rl import liveness
from megatron_rl.compat import megatron_checkpoint
from megatron_rl.config import RunConfig
from megatron_rl.files import naming_full_disk, size_and_sum
from megatron_rl.models.run_checkpoint import read_about
from megatron_rl.trainer import checkpoint_folder, world
from megatron_rl.trainer.model import Policy
from megatron_rl.weights.buckets import pin

StateWriter = Callable[[int, str], None]


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are whole."""


class Saver:
    """Writes the checkpoints of a run in the background; collective over the trainer ranks.

    It keeps memory of the host for the bytes that this rank writes. ConfigError: the disk has no
    space for `checkpoint.keep` checkpoints and the next one.
    """

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        self._config, self._policy = config, policy
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._memory = np.empty(0, np.uint8)
        checkpoint_folder.check_space(config, tensor_bytes(config, policy), reserve=True)

    def save(self, step: int, write_state: StateWriter | None = None) -> Path:
        """Begin the checkpoint after `step` optimizer steps; it is complete after `wait`.

        `write_state` adds files: it is called on rank 0 with the step and the temporary directory.
        If it raises, no checkpoint is left behind. Returns the directory that is to be; an older
        one of the same step is replaced.

        Raises:
            ConfigError: the disk has no space for it.
            SaveError: the one before, which is completed first, could not be written.
        """
        self.wait()
        liveness.sign("saving", step)
        final = checkpoint_folder.folder(self._config) / f"step_{step:06d}"
        work, group, first = final.with_suffix(".tmp"), world.control_group(), dist.get_rank() == 0
        if first:
            shutil.rmtree(work, ignore_errors=True)
            with naming_full_disk(work):
                (work / "model").mkdir(parents=True)
        dist.barrier(group=group)
        state = _sharded_state(self._policy, is_loading=False)
        planned = megatron_checkpoint.Save(state, work / "model")
        size = torch.tensor(planned.num_bytes)
        dist.all_reduce(size, group=group)
        checkpoint_folder.check_space(self._config, int(size))
        planned.copy(self._copies(planned.tensors))
        if first and write_state is not None:
            write_state(step, str(work))
        self._pending = self._thread.submit(self._complete, planned, work, step)
        return final

    def _copies(self, tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield copies on the host, each over a part of the same memory."""
        aligned = [-(-tensor.nbytes // 64) * 64 for tensor in tensors]
        if self._memory.size != sum(aligned):
            self._memory = np.empty(sum(aligned), np.uint8)
            pin([self._memory])
        copies, start = [], 0
        for tensor, size in zip(tensors, aligned, strict=True):
            # A view of all would be saved as all; this has a storage of its size.
            part = self._memory[start : start + tensor.nbytes]
            copy = torch.empty(0, dtype=tensor.dtype)
            if part.size:
                copy = torch.frombuffer(part, dtype=tensor.dtype)
            copies.append(copy.view(tensor.shape).copy_(tensor, non_blocking=True))
            start += size
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return iter(copies)

    def _complete(self, planned: megatron_checkpoint.Save, work: Path, step: int) -> None:
        """Write this rank's files; on rank 0, put the checkpoint in place when all have."""
        rank, group = dist.get_rank(), world.background_group()
        part: tuple[list[Any], dict[str, tuple[int, str]], str | None]
        try:
            with naming_full_disk(work):
                paths, results = planned.write()
            part = results, {str(p.relative_to(work)): size_and_sum(p) for p in paths}, None
        except Exception as e:  # noqa: BLE001 - the others wait for this part
            part = [], {}, f"rank {rank}: {type(e).__name__}: {e}"
        parts: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(part, parts, group=group)
        problem = [None if parts is None else self._put_in_place(planned, work, step, parts)]
        dist.broadcast_object_list(problem, group=group)
        if problem[0] is not None:
            raise SaveError(f"checkpoint of step {step}: {problem[0]}")

    def _put_in_place(
        self, planned: megatron_checkpoint.Save, work: Path, step: int, parts: list[Any]
    ) -> str | None:
        """Return what went wrong, on any rank."""
        results, sums, problems = zip(*parts, strict=True)
        problem = next((p for p in problems if p is not None), None)
        try:
            if problem is None:
                with naming_full_disk(work):
                    planned.finish(list(results))
                files = {name: value for part in sums for name, value in part.items()}
                for path in sorted(p for p in work.rglob("*") if p.is_file()):
                    name = str(path.relative_to(work))
                    files[name] = files.get(name) or size_and_sum(path)
                checkpoint_folder.put_in_place(work, step, _layout(self._config), files)
                checkpoint_folder.remove_old(self._config)
        except Exception as e:  # noqa: BLE001 - the others wait for it
            problem = f"{type(e).__name__}: {e}"
        if problem is not None:
            shutil.rmtree(work, ignore_errors=True)  # the disk may be full
        return problem

    def failed(self) -> bool:
        """Return True once the last checkpoint could not be written; `wait` raises the cause."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def wait(self) -> None:
        """Wait until the last checkpoint is complete on every rank, or raise SaveError."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """End the thread, after the last checkpoint is complete or has failed."""
        self._thread.shutdown(wait=True)


def tensor_bytes(config: RunConfig, policy: Policy) -> int:
    """Return the bytes of all tensors of a checkpoint, without padding."""
    element = next(iter(policy.parameters.values())).element_size()
    # Two moments, and a fp32 value where the optimizer has it apart from the parameter.
    optimizer = 12 if element < 4 or _is_sharded(_layout(config)) else 8
    return policy.architecture.parameters() * (element + optimizer)


def load(config: RunConfig, policy: Policy, directory: str | Path) -> int:
    """Restore parameters, optimizer and random state; collective over the trainer ranks.

    The parallel layout may differ from that of the finished checkpoint `directory`, except in the
    number of expert-parallel ranks and in whether the optimizer is sharded. Its files were checked
    by `checkpoint_folder.resume_from`. Returns the optimizer steps that made the weights.

    Raises:
        FileNotFoundError: no complete checkpoint.
        ValueError: a checkpoint that this program or this layout cannot read.
    """
    path = Path(directory)
    about = read_about(path)
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
    before, after = _is_sharded(old), _is_sharded(new)
    if before != after:
        raise ValueError(
            f"{path} has {kinds[before]} and cannot be resumed with {kinds[after]}: it is sharded"
            " under parallel.distributed_optimizer with data or context parallelism; keep these"
        )


def _is_sharded(layout: dict[str, Any]) -> bool:
    replicas = layout["world_size"] > layout["tensor"] * layout["pipeline"]
    return bool(layout["distributed_optimizer"] and replicas)


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
