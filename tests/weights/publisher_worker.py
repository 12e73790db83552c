"""Four gloo ranks that publish versions of the stand-in model of `export_worker`.

Run by `test_publisher.py` through `tests.workers`. Every check is in here, where the ranks are.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import RunConfig
from megatron_rl.messages import Manifest
from megatron_rl.models import architecture, tiny
from megatron_rl.trainer import publisher as module
from megatron_rl.trainer.export import export
from megatron_rl.trainer.publisher import Publisher
from megatron_rl.weights import difference
from megatron_rl.weights.loading import NodeStores
from megatron_rl.weights.manifest import WeightsError, checksum
from megatron_rl.weights.number_format import WireFormat
from megatron_rl.weights.store import PAGE, VERSIONS_HELD
from tests.weights.export_worker import LAYOUTS, SIZES, WORLD, Sharded

CASES = {"tiny_dense": "TP2 PP2 VPP2", "tiny_scout": "EP2 ETP2"}
BUCKET = 20_000


def config(folder: Path, *, shared: bool = False, seconds: float = 30.0) -> RunConfig:
    return RunConfig(
        weights={"bucket_bytes": BUCKET, "directory": str(folder / "shared") if shared else None},
        timeouts={"transfer_seconds": seconds},
    )


class Run:
    """A publisher, its model, and on rank 0 what it announced."""

    def __init__(self, rank: int, config: RunConfig, name: str) -> None:
        self.rank, self.config = rank, config
        kind = architecture({**tiny.CONFIGS[name], **SIZES})
        self.policy = Sharded(kind, LAYOUTS[CASES[name]], rank)
        self.policy.fill(0)
        self.announced: list[Manifest] = []
        node = "b" if rank == WORLD - 1 else "a"
        self.publisher = Publisher(
            config,
            self.policy,  # type: ignore[arg-type]
            node,
            lambda manifest, _: self.announced.append(manifest),
        )

    def change(self) -> None:
        """Change one value of each shard, the same on all replicas."""
        with torch.no_grad():
            for parameter in self.policy.parameters.values():
                parameter.view(-1)[parameter.numel() // 3] += 0.5

    def exported(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the current weights as they travel, on rank 0."""
        return dict(WireFormat.of(self.config).stream(export(self.policy, 2**30)))  # type: ignore[arg-type]

    def check(self, version: int, expected: dict[str, torch.Tensor]) -> None:
        """Compare the newest version with what should have been published (rank 0)."""
        manifest = self.announced[-1]
        assert manifest.version == version
        stores = NodeStores()
        with stores.checked(manifest, "", 1.0):
            tensors = dict(stores.tensors(manifest, ""))
            assert list(tensors) == sorted(expected)
            for name, tensor in tensors.items():
                assert tensor.dtype == torch.bfloat16
                assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), name
        assert sorted({bucket.owner for bucket in manifest.buckets}) == list(range(WORLD))
        assert manifest.num_bytes == sum(bucket.num_bytes for bucket in manifest.buckets)

    def differences(self) -> float:
        """Compare the newest version's differences with the bytes; return the part that has one."""
        manifest, made = self.announced[-1], []
        for store, numbers in NodeStores().map(manifest, ""):
            slots = store.complete(manifest.version - 1), store.complete(manifest.version)
            for local in range(len(numbers)):
                old, new = (store.bucket(slot, local).view("u2") for slot in slots)
                size = 8 + 4 * int((old != new).sum())
                chain = store.header.chain(local, manifest.version, [manifest.version - 1])
                assert (chain is not None) == (size <= store.largest_difference(local))
                made.append(chain is not None)
                if chain:
                    assert size == store.header.sizes_2N[chain[0], local]
                    start = store.places.differences[local]
                    bucket = old.view("u1").copy()
                    difference.apply(bucket, store.regions()[3 + chain[0]][start : start + size])
                    assert (bucket.view("u2") == new).all()
        return sum(made) / len(made)


def versions_are_the_export(rank: int, folder: Path) -> None:
    """All bytes, differences, memory, and folders of the versions of a run."""
    for name in CASES:
        run = Run(rank, config(folder), name)
        sizes = set()
        for version, few in ((1, False), (2, True), (3, False), (4, True), (5, True), (9, True)):
            run.change() if few else run.policy.fill(version)
            expected = run.exported()
            run.publisher.publish(version)
            run.publisher.wait()
            if rank == 0:
                run.check(version, expected)
                manifest = run.announced[-1]
                assert manifest.nodes == ("a", "b")
                if version in (2, 3, 4, 5):
                    part = run.differences()
                    assert part > 0.5 if few else part == 0
                sizes.add(sum(512 * f.stat().st_blocks for f in run.publisher.root.glob("[0-9]/*")))
            dist.barrier()
        with pytest.raises(WeightsError, match="version 9 was published after version 9"):
            run.publisher.publish(9)
        if rank == 0:
            assert len(sizes) == 1
            pages = 10 * (len(manifest.buckets) + WORLD) * PAGE
            assert sizes.pop() <= VERSIONS_HELD * manifest.num_bytes + pages
        dist.barrier()
        run.publisher.close()
        dist.barrier()
        assert not run.publisher.root.exists()


def training_goes_on_while_a_version_is_completed(rank: int, folder: Path) -> None:
    """`publish` returns before checksums, and later changes are not in the version."""
    # Another run's, whose locks on another node may be invisible here.
    other = folder / "shared" / f"{module.FOLDER_PREFIX}other"
    if rank == 0:
        other.mkdir(parents=True)
        (other / "users").touch()
    dist.barrier()
    run = Run(rank, config(folder, shared=True), "tiny_dense")
    dist.barrier()
    assert other.exists()
    allowed = threading.Event()

    def waiting(data: Any) -> str:
        assert allowed.wait(30)
        return checksum(data)

    module.checksum = waiting  # type: ignore[attr-defined]
    expected = run.exported()
    run.publisher.publish(1)
    run.publisher.raise_if_failed()
    assert run.announced == []
    run.policy.fill(7)  # an optimizer step
    dist.barrier()
    allowed.set()
    run.publisher.wait()
    if rank == 0:
        run.check(1, expected)
        assert run.announced[0].nodes == ()  # all nodes see the folder
        assert Path(run.announced[0].root).parent == folder / "shared"
    dist.barrier()
    run.publisher.close()
    module.checksum = checksum  # type: ignore[attr-defined]


def an_error_in_the_background_is_raised(rank: int, folder: Path) -> None:
    """On the rank where it happens by its own name, and on rank 0, which waits for that rank."""
    run = Run(rank, config(folder, seconds=2.0), "tiny_dense")

    def broken(data: Any) -> str:
        if rank == 1:
            raise OSError("a page could not be read")
        return checksum(data)

    module.checksum = broken  # type: ignore[attr-defined]
    run.publisher.publish(1)
    if rank == 1:
        with pytest.raises(OSError, match="a page could not be read"):
            run.publisher.publish(2)
    elif rank == 0:
        with pytest.raises(RuntimeError):  # of gloo, after the time-out
            run.publisher.publish(2)
        assert run.announced == []
    run.publisher.close()


def main(rank: int, folder: Path) -> None:
    """Run all checks on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), WORLD), rank=rank, world_size=WORLD
    )
    versions_are_the_export(rank, folder)
    training_goes_on_while_a_version_is_completed(rank, folder)
    an_error_in_the_background_is_raised(rank, folder)
    (folder / f"done{rank}").touch()
