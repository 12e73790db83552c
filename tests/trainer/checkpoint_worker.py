"""One of four gloo processes that save and load checkpoints under one layout after another.

Started by `test_checkpoint_layouts.py`; each rank writes what it saw.
"""

from __future__ import annotations

import functools
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trainer.cases import batch, run_config, save_checkpoint

RANKS = 4
VOCABULARY = 1025
"""Odd: it is padded, differently for each size of tensor parallelism."""
TP, PP, CP = ({f"parallel__{name}": 2} for name in ("tensor", "pipeline", "context"))
EP = {"parallel__expert": 2}
BF16 = {"precision__params": "bf16"}
CHAINS: dict[str, list[dict[str, Any]]] = {
    "tiny_dense": [BF16 | layout for layout in ({}, TP, {**PP, **CP}, {})],
    "tiny_scout": [EP, {**TP, **EP, "parallel__sequence_parallel": True}, {**PP, **EP}, EP],
}
"""Model -> the layouts that its state passes through, after a step under the first."""


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors that were created inside, at any time and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(t) for t in tree_leaves((args, kwargs)) if _counts(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if _counts(tensor) and _address(tensor) not in given:
                storage = tensor.untyped_storage()
                given.add(_address(tensor))
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


def _counts(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and not value.is_meta


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def own_bytes(policy: Any) -> tuple[int, int, int]:
    """Return the bytes of this rank's parameters, of its optimizer's shard and the largest tensor.

    The optimizer has three fp32 values for each element of its shard.
    """
    sizes = [p.numel() * p.element_size() for p in policy.parameters.values()]
    ranges = [
        sum(p.numel() for group in one.optimizer.param_groups for p in group["params"])
        for one in policy.optimizer.chained_optimizers
    ]
    return sum(sizes), 12 * sum(ranges), max(sizes)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, without the padding of the vocabulary."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load_plain_tensors(str(path / "model"))
    padded = ("word_embeddings.weight", "output_layer.weight")
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return {k: t[:VOCABULARY] if k.endswith(padded) else t for k, t in tensors.items()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not in both, or not equal."""
    both = a.keys() & b.keys()
    return sorted((a.keys() ^ b.keys()) | {k for k in both if not a[k].equal(b[k])})


def through_layouts(rank: int, folder: Path, name: str) -> dict[str, Any]:
    """Train a step, save, and take the checkpoint through the layouts of `CHAINS`."""
    from megatron_rl.trainer import checkpoint
    from megatron_rl.trainer.export import export
    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.step import Trainer
    from megatron_rl.trainer.world import destroy_world, init_world

    seen: dict[str, Any] = {"differing": [], "memory": [], "next": []}
    path, first = None, {}
    for i, layout in enumerate(CHAINS[name]):
        out = folder / "out" / f"{name}{i}"
        config = run_config(folder / name, RANKS, output_dir=out, **layout)
        init_world(config, rank, RANKS, dist.FileStore(str(folder / f"store {name}{i}"), RANKS))
        policy = Policy(config, folder / name)
        memory = {"own": own_bytes(policy)}
        if path is None:
            Trainer(config, policy).train_step(batch(0), 0)
        else:
            with LiveBytes() as live:
                assert checkpoint.load(config, policy, path) == 1
            memory["load"] = live.peak
        saver = checkpoint.Saver(config, policy)
        with LiveBytes() as live:
            path = saver.save(1)
            saver.wait()
        saver.close()
        memory |= {"save": live.peak, "kept": saver._memory.nbytes}
        seen["memory"].append(memory)
        if rank == 0:
            tensors = tensors_of(path)
            first = first or tensors
            seen["differing"].append(differing(first, tensors))
        if i in (0, len(CHAINS[name]) - 1):
            Trainer(config, policy).train_step(batch(1, seed=1), 1)
            seen["next"].append(dict(export(policy)))
        destroy_world()
    return seen


def files_of_upstream(rank: int, folder: Path) -> dict[str, Any]:
    """Exchange files with Megatron's own methods, which gather."""
    from megatron_rl.compat import megatron_checkpoint
    from megatron_rl.trainer import checkpoint
    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.step import Trainer
    from megatron_rl.trainer.world import destroy_world, init_world

    ours = megatron_checkpoint.shard_optimizer
    seen: dict[str, Any] = {}
    for name, layouts in CHAINS.items():
        out = folder / "upstream" / name
        config = run_config(folder / name, RANKS, output_dir=out, **layouts[1])
        store = dist.FileStore(str(folder / f"store upstream {name}"), RANKS)
        init_world(config, rank, RANKS, store)
        path, written = out, []
        for step, method in enumerate((lambda optimizer: None, ours, lambda optimizer: None)):
            megatron_checkpoint.shard_optimizer = method
            policy = Policy(config, folder / name)
            if step == 0:
                Trainer(config, policy).train_step(batch(0), 0)
            else:  # what the other method wrote
                checkpoint.load(config, policy, path)
            path = save_checkpoint(config, policy, step)
            if rank == 0:
                written.append(tensors_of(path))
        if rank == 0:
            seen[name] = [differing(written[0], tensors) for tensors in written[1:]]
        megatron_checkpoint.shard_optimizer = ours
        destroy_world()
    return seen


def slow_disk(rank: int, folder: Path) -> list[bool]:
    """Write a checkpoint and a Hugging Face directory while one rank's disk is slow.

    Returns:
        For each call of this rank that NCCL would time, whether the slow rank was writing then.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from megatron_rl.trainer import hf_checkpoint
    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.world import destroy_world, init_world

    out = folder / "slow"
    options = {**TP, **PP, "weights__bucket_bytes": 2**14}
    config = run_config(folder / "tiny_dense", RANKS, output_dir=out, **options)
    init_world(config, rank, RANKS, dist.FileStore(str(folder / "store slow"), RANKS))
    policy = Policy(config, folder / "tiny_dense")
    writing, timed = folder / "writing", []

    def slow(function: Any, seconds: float) -> Any:
        def wrapper(*args: Any, **options: Any) -> Any:
            writing.touch()
            time.sleep(seconds)
            result = function(*args, **options)
            writing.unlink()
            return result

        return wrapper

    def observed(function: Any) -> Any:
        def wrapper(*args: Any, **options: Any) -> None:
            if options.get("group") is None:
                timed.append(writing.exists())
            function(*args, **options)

        return wrapper

    dist.send, dist.barrier = observed(dist.send), observed(dist.barrier)
    if rank == RANKS - 1:
        write = slow(FileSystemWriterAsync.write_preloaded_data, 1.0)
        FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
    save_checkpoint(config, policy, 0)
    hf_checkpoint.save_file = slow(hf_checkpoint.save_file, 0.1)
    hf_checkpoint.write = functools.partial(hf_checkpoint.write, max_shard_bytes=2**16)
    hf_checkpoint.save_huggingface(policy, folder / "hf", folder / "tiny_dense")
    destroy_world()
    return timed


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    seen: dict[str, Any] = {name: through_layouts(rank, folder, name) for name in CHAINS}
    seen["upstream"] = files_of_upstream(rank, folder)
    seen["timed"] = slow_disk(rank, folder)
    torch.save(seen, folder / f"seen{rank}.pt")
