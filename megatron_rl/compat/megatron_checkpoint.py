"""Megatron-Core's distributed checkpoint without gathers, staging and a helper process.

Upstream gathers a distributed optimizer's whole fp32 buffers on every data-parallel rank to save
them as `fully_reshardable`, and allocates as much to load them. Here each rank writes and reads its
own range of each parameter, as boxes of the parameter (`shard_optimizer`). The files hold the same
tensors under the same keys, so either side reads what the other wrote, under any layout.

`Save` gives the caller the steps between which upstream goes through a process of its own, so that
a thread of this process can write, without any collective but those of the plan. Upstream passes
the results through a queue of a spawned `multiprocessing.Manager`, which costs seconds at the first
save, a re-import of the main script, and an orphan that keeps stdout open when a rank is killed;
its pinned blocks are rounded up to powers of two.
"""

import math
import queue
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

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


class _ItemStream:
    """A stream that keeps the error of a write until `close`.

    `torch.save` writes from C++, and puts an error of its own in place of that (of a full disk).
    The traceback is not kept: with its views of a `BytesIO`, the interpreter crashes when it
    collects the two as garbage (CPython 3.12).
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write, unless a write before has failed; return the size of the data in any case."""
        try:
            if self._error is None:
                self._file.write(data)
        except OSError as e:
            self._error = OSError(e.errno, e.strerror)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Leave that to the file, which is closed when all items are in it."""

    def close(self) -> None:
        """Raise the error of a write; the file stays open."""
        if self._error is not None:
            raise self._error


class _ItemStreams:
    def transform_save_stream(self, _: Any, file: Any) -> tuple[_ItemStream, list[str]]:
        return _ItemStream(file), []


class Save:
    """A state of Megatron's sharded tensors and objects on its way into an empty folder.

    Planning it is collective; `copy`, `write` and `finish` follow in this order, on any thread.
    """

    def __init__(self, state: dict[str, Any], directory: Path) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        write_in_process()
        self._directory, self._strategy = directory, TorchDistSaveShardedStrategy()
        changed: Any = self._strategy
        make_request = changed._get_save_and_finalize_callbacks

        def keep_plan(writer: Any, planned: Any, *names: Any) -> Any:
            self._writer, self._metadata, _ = planned
            return make_request(writer, planned, *names)

        changed._get_save_and_finalize_callbacks = keep_plan
        options = {"async_sharded_save": True, "async_strategy": "mcore"}
        dist_checkpointing.save(state, str(directory), changed, **options)
        self._files = self._writer.write_buckets
        """(path, name, ([(item, bytes)], [(item, tensor)])) of each file of this rank."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that this rank writes, each on its device."""
        return [tensor for *_, (_, tensors) in self._files for _, tensor in tensors]

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank writes, without the headers of tensors."""
        data = sum(item.getbuffer().nbytes for *_, (data, _) in self._files for _, item in data)
        return data + sum(tensor.nbytes for tensor in self.tensors)

    def copy(self, copies: Iterator[torch.Tensor]) -> None:
        """Write these tensors, on the host, in place of `tensors`, which are released."""
        self._files = [
            (path, name, (data, [(item, next(copies)) for item, _ in tensors]))
            for path, name, (data, tensors) in self._files
        ]
        self._writer.write_buckets = None

    def write(self) -> tuple[list[Path], list[Any]]:
        """Write this rank's files; return them, and the results that rank 0 needs to `finish`.

        Raises:
            OSError: a file could not be written.
        """
        writer, results = self._writer, list[Any]()
        for number, file in enumerate(self._files):
            options = {"results_queue": None, "count_queue": None, "use_fsync": True}
            _, written = writer.write_preloaded_data([_ItemStreams()], number, file, **options)
            if isinstance(written, Exception):
                raise written
            results += written
        paths = [Path(path) for path, *_ in self._files]
        self._files = []
        return paths, results

    def finish(self, results: list[list[Any]]) -> None:
        """Write the metadata, from the results of all ranks; on rank 0."""
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        self._writer.finish(self._metadata, results)
        backend = CheckpointingConfig(self._strategy.backend, self._strategy.version)
        save_config(backend, str(self._directory))


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
