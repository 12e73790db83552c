"""One of four gloo ranks of `test_parts.py`: what each receives of a batch, by layout.

There is no model: only the world, and the batch's way from rank 0. Each rank writes what it saw.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import messages
from megatron_rl.models import architecture, tiny
from megatron_rl.trainer import step as trainer_step
from megatron_rl.trainer import world
from megatron_rl.trainer.batch import MicroBatch, micro_batches_of
from megatron_rl.trainer.shards import ModelShards
from megatron_rl.trainer.step import next_batch, token_results
from tests.trainer.cases import batch, run_config, with_random_routes

RANKS, PIECE_BYTES = 4, 50
MODEL = architecture(tiny.CONFIGS["tiny_qwen3_moe"])
TP, PP, CP = ({f"parallel__{way}": 2} for way in ("tensor", "pipeline", "context"))
PADDED = {"schedule__packing": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP4": {},
    "EP2": {"parallel__expert": 2},
    "DP2 TP2": TP,
    "DP2 PP2": PP,
    "DP2 CP2": CP,
    "DP2 CP2 padded": {**CP, **PADDED},
    "TP2 PP2": {**TP, **PP},
    "TP2 CP2 SP": {**TP, **CP, "parallel__sequence_parallel": True},
}
EMPTY = {
    "bounds": bytes(4),
    "probe": [],
    **dict.fromkeys(("prompt_lengths", "token_ids", "advantages", "generator_logprobs"), b""),
    **dict.fromkeys(("loss_weights", "versions", "prompt_ids", "completion_indices"), b""),
}


def batches() -> dict[str, messages.Batch]:
    """Return the batches that travel, by name; those of one step follow each other."""
    return {
        "routes": with_random_routes(batch(3, sequences=21, save=True), MODEL),
        "no routes": batch(4, sequences=21, seed=1),
        # Fewer sequences than ranks: some have no token.
        "few": with_random_routes(batch(5, sequences=2, seed=2, probe=[0]), MODEL),
        "empty": batch(6, **EMPTY),
        "stop": messages.Batch(step=7, stop=True),
    }


class Source:
    """Rank 0's source of one batch."""

    def __init__(self, message: messages.Batch) -> None:
        self.message = message

    def next_batch(self, step: int) -> messages.Batch:
        assert step == self.message.step
        return self.message


class Counted:
    """The bytes of the messages of this rank, from now on."""

    def __init__(self) -> None:
        self.sent, self.received, self.largest = 0, 0, 0
        send, recv, broadcast = dist.send, dist.recv, dist.broadcast

        def sending(tensor: Tensor, *args: Any, **options: Any) -> None:
            self.sent += self.size(tensor)
            send(tensor, *args, **options)

        def receiving(tensor: Tensor, *args: Any, **options: Any) -> None:
            self.received += self.size(tensor)
            recv(tensor, *args, **options)

        def broadcasting(tensor: Tensor, *, src: int, group: Any) -> None:
            if src != dist.get_rank():
                self.received += self.size(tensor)
            broadcast(tensor, src=src, group=group)

        self.restored = {"send": send, "recv": recv, "broadcast": broadcast}
        dist.send, dist.recv, dist.broadcast = sending, receiving, broadcasting

    def size(self, tensor: Tensor) -> int:
        self.largest = max(self.largest, tensor.nbytes)
        return tensor.nbytes

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self.restored.items():
            setattr(dist, name, function)


def equal(a: MicroBatch, b: MicroBatch) -> bool:
    """Return True if all fields of two micro-batches are the same, bit for bit."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in MicroBatch.__slots__]
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


def versions_agree(message: messages.Batch, micros: list[MicroBatch]) -> bool:
    """Return True if `same_version_T` and `versions_T` are those of the whole batch, by hand."""
    bounds, versions = messages.ints(message.bounds), messages.ints(message.versions)
    same = np.zeros(len(versions), dtype=bool)
    for start, end in pairwise(bounds):
        sampled = versions[start:end] >= 0
        same[start:end] = sampled & (versions[start:end][sampled] == message.step).all()
    return all(
        micro.same_version_T.numpy().tolist() == same[micro.source_T.numpy()].tolist()
        and micro.versions_T.numpy().tolist() == versions[micro.source_T.numpy()].tolist()
        for micro in micros
    )


def returned(shards: ModelShards, message: messages.Batch) -> bool:
    """Return True if rank 0 has each token's results, from one rank, and other ranks none."""
    micros = micro_batches_of(message, shards)
    for micro in micros if shards.reports else ():
        micro.logprobs_T = micro.generator_logprobs_T + micro.source_T / 2**10
        micro.entropy_T = micro.source_T.float()
    ratios, entropies = token_results(message, micros, shards)
    if dist.get_rank():
        return ratios == entropies == b""
    bounds, lengths = messages.ints(message.bounds), messages.ints(message.prompt_lengths)
    spans = zip(bounds[:-1] + lengths, bounds[1:], strict=True)
    flat = np.concatenate([np.zeros(0, int), *(np.arange(*span) for span in spans)])
    close = np.allclose(messages.floats(ratios), np.exp(flat / 2**10), rtol=2.5e-4)
    return close and messages.floats(entropies).tolist() == flat.tolist()


def received(shards: ModelShards, message: messages.Batch) -> dict[str, Any]:
    """Receive a batch, and return what this rank has then."""
    source = Source(message) if dist.get_rank() == 0 else None
    with Counted() as counted:
        part, stopped = next_batch(source, message.step, lambda: False, shards)
    assert not stopped and (part.stop, part.save) == (message.stop, message.save)
    bytes_ = {name: getattr(counted, name) for name in ("sent", "received", "largest")}
    if message.stop:
        return bytes_
    own, whole = micro_batches_of(part, shards), micro_batches_of(message, shards)
    used: set[int] = set()
    for micro in own:
        used |= set(micro.origin_BS[micro.origin_BS >= 0].tolist()) | set(micro.source_T.tolist())
    flat = np.array(sorted(used), dtype=np.int64)
    ids = messages.ints(message.token_ids)[flat]
    return {
        **bytes_,
        "tokens": flat.tolist(),
        "only its own": messages.ints(part.token_ids).tolist() == ids.tolist(),
        "the same micro-batches": len(own) == len(whole) and all(map(equal, own, whole)),
        "versions": versions_agree(message, own),
        "routed": all((micro.experts_RLK is not None) == bool(message.routes) for micro in own),
        "routes": sum(map(len, part.routes)),
        "returned": returned(shards, message),
    }


def main(rank: int, folder: Path) -> None:
    trainer_step.PIECE_BYTES = PIECE_BYTES
    torch.set_num_threads(1)
    seen = {}
    for i, (layout, options) in enumerate(LAYOUTS.items()):
        config = run_config(folder, RANKS, **options)
        world.init_world(config, rank, RANKS, dist.FileStore(str(folder / f"store{i}"), RANKS))
        shards = ModelShards(config, MODEL)
        seen[layout] = {name: received(shards, message) for name, message in batches().items()}
        world.destroy_world()
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
