"""Versions on this node that are torn, truncated, stale or missing are refused by name."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from megatron_rl.messages import Manifest
from megatron_rl.weights.loading import NodeStores
from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.store import NONE, Store
from tests.weights.versions import Versions

SECONDS = 0.2


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"layers.{i}.weight": torch.randn(64, 96, generator=generator) for i in range(9)}
    weights["norm.weight"] = torch.randn(33, generator=generator).bfloat16()
    weights["a_proj.weight"] = torch.randn(128, 128, generator=generator).to(torch.float8_e4m3fn)
    return weights


@pytest.fixture
def versions(tmp_path: Path) -> Iterator[Versions]:
    versions = Versions(tmp_path / "trainer", 60_000, owners=3)
    yield versions
    versions.close()


def loaded(stores: NodeStores, manifest: Manifest, folder: str = "") -> dict[str, torch.Tensor]:
    """Return copies of the tensors of a checked version."""
    taken: dict[str, torch.Tensor] = {}
    with stores.checked(manifest, folder, SECONDS):
        taken.update((n, t.clone()) for n, t in stores.tensors(manifest, folder))
    return taken


def refused(stores: NodeStores, manifest: Manifest, folder: str = "") -> str:
    with pytest.raises(WeightsError) as error, stores.checked(manifest, folder, SECONDS):
        pass
    return str(error.value)


def test_what_is_loaded_is_what_was_written_in_the_order_of_names(versions):
    stores = NodeStores()
    for version in (1, 2, 5):
        expected = tensors(version)
        taken = loaded(stores, versions.write(version, expected))
        assert list(taken) == sorted(expected)
        for name, tensor in taken.items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


def test_a_changed_byte_is_refused_with_the_bucket(versions):
    stores = NodeStores()
    manifest = versions.write(5, tensors(5))
    for number in range(len(manifest.buckets)):
        versions.bucket(5, number)[-1] ^= 1
        text = refused(stores, manifest)
        assert f"version 5: bucket {number} in {versions.root}/{number % 3}" in text
        assert "the old version stays" in text
        versions.bucket(5, number)[-1] ^= 1
    assert len(loaded(stores, manifest)) == 11


def test_a_version_that_is_replaced_or_not_yet_complete_is_refused(versions):
    stores = NodeStores()
    first = versions.write(1, tensors(1))
    second = versions.write(2, tensors(2))
    assert len(loaded(stores, first)) == len(loaded(stores, second)) == 11
    third = versions.write(3, tensors(3))
    assert "version 1 is not complete in" in refused(stores, first)
    assert "whose newest is 3" in refused(stores, first)
    store = versions.stores[1]
    store.header.versions_2N[store.complete(3), -1] = NONE  # one bucket is being written
    assert f"version 3 is not complete in {store.folder}, whose newest is 2" in refused(
        stores, third
    )
    assert len(loaded(stores, second)) == 11


def test_a_version_stays_while_it_is_held_and_a_writer_is_waited_for(versions):
    stores = NodeStores()
    versions.write(1, tensors(1))
    second = versions.write(2, tensors(2))
    written = threading.Event()

    def write() -> None:
        versions.write(3, tensors(3))
        versions.write(4, tensors(4))  # over version 2
        written.set()

    writer = threading.Thread(target=write)
    with stores.checked(second, "", SECONDS):
        writer.start()
        assert not written.wait(0.1)
        taken = {n: t.clone() for n, t in stores.tensors(second, "")}
    writer.join(20)
    assert written.is_set()
    assert torch.equal(taken["layers.8.weight"], tensors(2)["layers.8.weight"])
    store = versions.stores[0]
    with store.locked(store.complete(4), write=True, seconds=0):
        manifest = msgspec.structs.replace(second, version=4)
        assert "it is being written" in refused(stores, manifest)


def test_truncated_foreign_and_missing_stores_are_refused_with_the_folder(versions, tmp_path):
    manifest = versions.write(1, tensors(1))
    path = versions.root / "1/slot1"
    size = path.stat().st_size
    os.truncate(path, size // 2)
    assert f"{path} has {size // 2} bytes, and these versions need {size}" in refused(
        NodeStores(), manifest
    )
    os.truncate(path, 0)
    text = refused(NodeStores(), manifest)
    assert f"bucket 1 in {path.parent} has another checksum" in text
    other = msgspec.structs.replace(manifest, root=str(tmp_path / "nothing"))
    text = refused(NodeStores(), other)
    assert f"{tmp_path}/nothing/0 has no store" in text
    assert "weights.directory" in text
    assert not (tmp_path / "nothing").exists()


def test_the_store_of_a_node_is_one_folder_of_all_buckets(versions, tmp_path):
    manifest = versions.write(1, tensors(1))
    folder = tmp_path / "node"
    store = Store(folder, [bucket.num_bytes for bucket in manifest.buckets])
    assert "version 1 is not complete" in refused(NodeStores(), manifest, str(folder))
    slot = store.slot_for(1)
    for number in range(len(manifest.buckets)):
        store.bucket(slot, number)[:] = versions.bucket(1, number).numpy()
        store.header.versions_2N[slot, number] = 1
    shutil.rmtree(versions.root)  # other nodes do not see it
    assert torch.equal(
        loaded(NodeStores(), manifest, str(folder))["norm.weight"], tensors(1)["norm.weight"]
    )


def maps_of(folder: Path) -> int:
    """Return how often this process maps files which are or were in a folder."""
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


def test_stores_of_an_earlier_writer_are_unmapped_for_those_of_another(tmp_path):
    stores = NodeStores()
    for number, name in enumerate(["a", "b", "b", "a"]):  # other folders, and other files in one
        versions = Versions(tmp_path / name, 60_000, owners=3)
        manifest = versions.write(5, tensors(number))
        taken = loaded(stores, manifest)
        assert torch.equal(taken["layers.8.weight"], tensors(number)["layers.8.weight"])
        root = versions.root
        with stores.checked(manifest, "", SECONDS):
            versions.close()  # a version that is held is loaded, though its files are gone
            assert len(dict(stores.tensors(manifest, ""))) == 11
        assert "has no store" in refused(stores, manifest)
        del versions
        assert maps_of(root) == 0
    versions = Versions(tmp_path / "c", 60_000, owners=3)
    with stores.checked(manifest := versions.write(1, tensors(1)), "", SECONDS):
        assert maps_of(versions.root) == 2 * 5 * 3  # the writer's, too
    stores.forget()
    assert maps_of(versions.root) == 5 * 3
    assert len(loaded(stores, manifest)) == 11
    versions.close()
