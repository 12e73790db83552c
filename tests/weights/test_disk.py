"""The transport `disk`: writing, refusals, deletion."""

from __future__ import annotations

import json
import time

import msgspec
import pytest
import torch

from megatron_rl.messages import Manifest
from megatron_rl.weights.buckets import tensor_info
from megatron_rl.weights.manifest import FORMAT, WeightsError, check_tensors, version_folder
from megatron_rl.weights.transports.disk import DiskPublisher, check_buckets, read_buckets


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"model.layers.{i}.weight": torch.randn(64, 96, generator=generator) for i in range(9)
    }
    weights["model.norm.weight"] = torch.randn(64, generator=generator).bfloat16()
    weights["lm_head.weight"] = torch.randn(96, 64, generator=generator).T  # not contiguous
    return weights


@pytest.fixture
def publisher(tmp_path):
    return DiskPublisher(tmp_path / "weights", keep=2)


@pytest.mark.parametrize("bucket_bytes", [1, 60_000, 2**30])
def test_what_is_read_is_what_was_published_for_every_bucket_size(publisher, bucket_bytes):
    for version in range(3):
        expected = tensors(version)
        manifest = publisher.publish(version, iter(expected.items()), bucket_bytes)
        read = list(read_buckets(manifest))
        assert [name for name, _ in read] == list(expected)
        assert all(torch.equal(t, expected[n]) and t.dtype == expected[n].dtype for n, t in read)
        check_buckets(manifest)
        text = (version_folder(publisher.directory, version) / "manifest.json").read_text()
        written = json.loads(text)
        assert written["format"] == FORMAT
        assert msgspec.convert(written["manifest"], Manifest) == manifest
    assert len(manifest.buckets) == {1: 11, 60_000: 5, 2**30: 1}[bucket_bytes]


def test_a_stream_that_reuses_its_buffer_is_copied(publisher):
    buffer = torch.empty(4)

    def stream():
        for i in range(3):
            yield f"t{i}", buffer.fill_(i)

    read = dict(read_buckets(publisher.publish(0, stream(), 2**20)))
    assert [t[0].item() for t in read.values()] == [0, 1, 2]


def test_a_version_appears_only_when_it_is_complete(publisher):
    def dies():
        yield "a", torch.ones(1000)
        yield "b", torch.ones(1000)
        assert [p.name for p in publisher.directory.glob("v*")] == []
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publisher.publish(7, dies(), 4000)
    assert list(publisher.directory.iterdir()) == []


def test_what_a_killed_publisher_left_is_cleared_and_replaced(tmp_path):
    first = DiskPublisher(tmp_path)
    first.publish(3, iter(tensors(1).items()), 2**20)
    (tmp_path / ".writing-000004").mkdir()
    second = DiskPublisher(tmp_path)
    assert not (tmp_path / ".writing-000004").exists()
    manifest = second.publish(3, iter(tensors(2).items()), 2**20)
    assert torch.equal(dict(read_buckets(manifest))["model.layers.0.weight"],
                       tensors(2)["model.layers.0.weight"])  # fmt: skip


def test_a_changed_byte_in_a_bucket_is_refused_with_its_name(publisher):
    manifest = publisher.publish(5, iter(tensors().items()), 60_000)
    path = version_folder(publisher.directory, 5) / manifest.buckets[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"version 5, .*00001.safetensors: checksum .* torn"):
        check_buckets(manifest)
    read = []
    with pytest.raises(WeightsError, match="00001.safetensors"):
        read.extend(name for name, _ in read_buckets(manifest))
    assert read == [t.name for t in manifest.tensors[: len(read)]]


def test_a_missing_or_empty_bucket_is_refused_with_its_name(publisher):
    manifest = publisher.publish(5, iter(tensors().items()), 60_000)
    path = version_folder(publisher.directory, 5) / manifest.buckets[2]
    path.write_bytes(b"")
    with pytest.raises(WeightsError, match=r"00002.safetensors: missing or empty"):
        check_buckets(manifest)
    path.unlink()
    with pytest.raises(WeightsError, match=r"00002.safetensors: missing or empty"):
        list(read_buckets(manifest))


def test_a_bucket_with_other_tensors_than_announced_is_refused(publisher):
    manifest = publisher.publish(5, iter(tensors().items()), 2**30)
    wrong = msgspec.structs.replace(manifest.tensors[0], shape=(96, 64))
    changed = msgspec.structs.replace(manifest, tensors=(wrong, *manifest.tensors[1:]))
    with pytest.raises(WeightsError, match=r"model.layers.0.weight is float32\[64, 96\]"):
        list(read_buckets(changed))
    longer = msgspec.structs.replace(
        manifest, tensors=(*manifest.tensors, msgspec.structs.replace(wrong, name="more"))
    )
    with pytest.raises(WeightsError, match="11 tensors in the buckets, 12 in the manifest"):
        list(read_buckets(longer))


def test_names_and_shapes_other_than_the_checkpoints_are_refused(publisher):
    expected = {name: tensor_info(name, t) for name, t in tensors().items()}
    weights = tensors()
    weights["model.layers.0.bias"] = weights.pop("model.layers.0.weight")
    manifest = publisher.publish(1, iter(weights.items()), 2**20)
    with pytest.raises(WeightsError, match=r"1 missing \['model.layers.0.weight'\], 1 unexpected"):
        check_tensors(manifest.tensors, expected, 1)
    weights = tensors()
    weights["model.norm.weight"] = torch.ones(32)
    manifest = publisher.publish(2, iter(weights.items()), 2**20)
    with pytest.raises(WeightsError, match=r"model.norm.weight has shape \[32\]"):
        check_tensors(manifest.tensors, expected, 2)
    weights["model.norm.weight"] = torch.ones(64)
    manifest = publisher.publish(3, iter(weights.items()), 2**20)
    with pytest.raises(WeightsError, match="norm.weight is float32, the engine holds bfloat16"):
        check_tensors(manifest.tensors, expected, 3)


def test_a_name_that_comes_twice_is_refused(publisher):
    twice = [("a", torch.ones(2)), ("b", torch.ones(2)), ("a", torch.ones(2))]
    with pytest.raises(WeightsError, match="yielded a twice"):
        publisher.publish(1, iter(twice), 2**20)


def test_old_versions_stay_until_they_are_released_and_the_newest_two_always(publisher):
    for version in range(5):
        publisher.publish(version, iter(tensors().items()), 2**20)
    assert publisher.versions == (0, 1, 2, 3, 4)
    publisher.release(1)
    assert publisher.versions == (2, 3, 4)
    publisher.release(4)
    assert publisher.versions == (3, 4)
    publisher.publish(5, iter(tensors().items()), 2**20)
    assert publisher.versions == (4, 5)
    assert sorted(p.name for p in publisher.directory.iterdir()) == ["v000004", "v000005"]
    publisher.close()
    assert not publisher.directory.exists()


def test_versions_only_grow(publisher):
    publisher.publish(4, iter(tensors().items()), 2**20)
    with pytest.raises(WeightsError, match="version 4 was published after version 4"):
        publisher.publish(4, iter(tensors().items()), 2**20)


def test_a_tiny_model_is_published_in_milliseconds(publisher):
    weights = {f"t{i}": torch.randn(64, 192) for i in range(32)}  # 1.6 MB
    publisher.publish(0, iter(weights.items()), 256 * 2**20)
    times = []
    for version in range(1, 8):
        start = time.perf_counter()
        publisher.publish(version, iter(weights.items()), 256 * 2**20)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05
