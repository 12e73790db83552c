"""Megatron-Core's distributed checkpoint without gathers, staging and a helper process.

Upstream gathers a distributed optimizer's whole fp32 buffers on every data-parallel rank to save
them as `fully_reshardable`, and allocates as much to load them. Here each rank writes and reads its
own range of each parameter, as boxes of the parameter (`shard_optimizer`). The files hold the same
tensors under the same keys, so either side reads what the other wrote, under any layout.

`save` copies one tensor at a time to the host (upstream: all of them first, to pinned blocks whose
sizes are rounded up to powers of two) and lets the ranks wait for each other in a group of the
caller, because writing can outlast NCCL's time-out. It writes in this process: upstream passes the
results through a queue of a spawned `multiprocessing.Manager`, for asynchronous saves, which costs
seconds at the first save, a re-import of the main script (which must guard its main part), and an
orphan that keeps stdout open when a rank is killed.
"""

import math
import queue
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

EVIDENCE = {
    "optimizer.distrib_optimizer": "return_on_all_ranks=return_on_all_ranks or is_loading",
    "dist_checkpointing.strategies.filesystem_async": "_results_queue = ctx.Manager().Queue()",
}
"""Module of `megatron.core` -> text of its source that requires the changes made here."""
Box = tuple[tuple[int, ...], tuple[int, ...]]


def write_in_process() -> None:
    """Let synchronous saves of this process use an ordinary queue; safe to repeat."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def save(state: dict[str, Any], directory: Path, group: dist.ProcessGroup) -> None:
    """Write a state of Megatron's sharded tensors and objects to an empty folder; collective.

    The time-out of `group`, of all ranks, is the longest that one rank may write for.
    """
    from megatron.core import dist_checkpointing

    write_in_process()
    request = dist_checkpointing.save(
        state, str(directory), async_sharded_save=True, async_strategy="mcore"
    )
    if request.async_fn is not None:  # there is something to write on this rank
        rank, files, results = request.async_fn_args
        request.async_fn(rank, one_by_one(files), results)
    dist.barrier(group=group)
    for finish in request.finalize_fns:
        finish()


def one_by_one(files: list[Any]) -> list[Any]:
    """Return Megatron's (path, key, (bytes, tensors)), its tensors copied to the host when read."""
    return [
        (path, key, (data, ((item, tensor.cpu()) for item, tensor in tensors)))
        for path, key, (data, tensors) in files
    ]


def shard_optimizer(optimizer: Any) -> None:
    """Let each rank of a distributed optimizer save and load its own shard; safe to repeat."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for one in optimizer.chained_optimizers:
        if isinstance(one, DistributedOptimizer):
            changed: Any = one
            changed.sharded_param_state_fully_reshardable = partial(_sharded_state, one)
            changed.load_parameter_state_from_fully_reshardable = partial(_load_state, one)


def _sharded_state(optimizer: Any, model: Any, is_loading: bool = False, _: Any = None) -> Any:
    """Return the boxes of this rank's fp32 parameters and moments, by position and name."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    if not is_loading and not optimizer.optimizer.state:  # it never stepped
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    sharded, _ = extract_sharded_tensors_and_factories(model)
    entries = {entry.data: entry for entry in nested_values(sharded)}
    state: dict[int, dict[str, list[Any]]] = {}
    for position, (parameter, own) in enumerate(_ranges(optimizer)):
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        tensors.pop("step", None)  # saved with the parameter groups
        state[position] = {name: [] for name in tensors}
        entry, first = entries[parameter], 0
        replica = (*entry.replica_id[:2], optimizer.distributed_optimizer_instance_id)
        for box in _boxes(entry, own.start, own.end):
            last = first + math.prod(box.local_shape)
            for name, tensor in tensors.items():
                data = tensor.detach()[first:last].view(box.local_shape)
                key = f"optimizer.state.{name}.{box.key}"
                shard = replace(box, key=key, data=data, dtype=data.dtype, replica_id=replica)
                state[position][name].append(shard)
            first = last
    return state or LocalNonpersistentObject(state)


@torch.no_grad()
def _load_state(optimizer: Any, state: dict[int, dict[str, list[torch.Tensor]]]) -> None:
    for position, (parameter, _) in enumerate(_ranges(optimizer)):
        saved = state[position].items()
        tensors = {name: torch.cat([box.reshape(-1) for box in boxes]) for name, boxes in saved}
        optimizer._set_main_param_and_optimizer_states(parameter, tensors)


def _ranges(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, Any]]:
    """Yield the parameters of which this rank has a part, and the range of their elements."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"]


def _boxes(entry: Any, start: int, stop: int) -> Iterator[Any]:
    """Yield sharded tensors without data for elements `start` to `stop` of a saved parameter.

    Raises:
        ValueError: it is saved as tensors that are not consecutive parts of it.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    entry = replace(entry, data=torch.empty_like(entry.data, device="meta"))
    parts = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
    end = 0
    for part in sorted(nested_values(parts), key=lambda part: part.data.storage_offset()):
        first, end = end, end + part.data.numel()
        if part.data.storage_offset() != first or not part.data.is_contiguous():
            raise ValueError(
                f"{entry.key}: Megatron saves this parameter as tensors that are not consecutive"
                " parts of it, so its optimizer state cannot be saved by shards; set"
                " parallel.distributed_optimizer=false"
            )
        more = part.prepend_axis_num
        low, high = max(start, first) - first, min(stop, end) - first
        for offset, shape in rectangles(part.local_shape, low, high):
            inner = (0,) * more + offset
            yield replace(
                part.without_data(),
                local_shape=(1,) * more + shape,
                global_offset=tuple(map(sum, zip(part.global_offset, inner, strict=True))),
                axis_fragmentations=None,  # boxes of several sizes
                prepend_axis_num=0,
            )


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield (offset, shape) of the boxes that elements `start` to `stop` of a tensor consist of.

    They are in the order of the elements; each is contiguous.
    """
    row = math.prod(shape[1:])
    while start < stop:
        first, inside = divmod(start, row)
        count, end = (stop - start) // row, min(stop - first * row, row)
        if count and not inside:
            yield (first, *(0 for _ in shape[1:])), (count, *shape[1:])
            start += count * row
        else:  # a part of one row
            for offset, size in rectangles(shape[1:], inside, end):
                yield (first, *offset), (1, *size)
            start = first * row + end
