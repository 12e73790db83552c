"""The transport `nccl`: chunks, parts, checksums, ranks on a CPU; the transfer where GPUs are."""

from __future__ import annotations

import base64

import pytest
import torch

from megatron_rl.weights.buckets import tensor_bytes, tensor_info
from megatron_rl.weights.device_checksum import checksum_of, device_checksum, word_sum
from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.transports.nccl_plan import (
    CheckedLoad,
    Part,
    chunk_counts,
    join_parts,
    split_parts,
)


def tensors(count: int = 9, seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16)
    return [
        (f"w{i}", torch.randn(8, 6 + 2 * i, generator=rng).to(dtypes[i % 2])) for i in range(count)
    ]


def part(sender: int, named: list[tuple[str, torch.Tensor]], bucket_bytes: int) -> Part:
    infos = tuple(tensor_info(n, t) for n, t in named)
    counts = chunk_counts([tensor_bytes(i) for i in infos], bucket_bytes)
    checksums, start = [], 0
    for count in counts:
        chunk = slice(start, start + count)
        checksums.append(checksum_of(infos[chunk], [t for _, t in named[chunk]]))
        start += count
    return Part(sender, infos, tuple(counts), tuple(checksums))


@pytest.mark.filterwarnings("ignore:Tensor .* exceeds buffer_size_bytes")
@pytest.mark.parametrize("bucket_bytes", [1, 300, 500, 1000, 10**9])
def test_chunks_are_cut_where_vllm_packs_them(bucket_bytes):
    packed_tensor = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor")
    named = tensors()
    iterator, counts = iter(named), []
    while (
        chunk := packed_tensor.pack_tensors(iterator, lambda item: item[1], bucket_bytes)
    ) is not None:
        start = sum(counts)
        counts.append(len(chunk.names))
        unpacked = packed_tensor.unpack_tensor(
            chunk.packed_tensor, chunk.names, chunk.shapes, chunk.dtypes, chunk.tensor_sizes
        )
        assert [n for n, _ in unpacked] == [n for n, _ in named[start : start + len(unpacked)]]
    assert chunk_counts([t.nbytes for _, t in named], bucket_bytes) == counts
    assert chunk_counts([], bucket_bytes) == []


def test_the_parts_of_all_senders_make_one_manifest_and_come_apart_again():
    parts = [part(4, tensors(5), 500), part(0, [("head", torch.ones(3, 3))], 500)]
    manifest = join_parts(21, parts)
    assert manifest.transport == "nccl"
    assert manifest.version == 21
    assert [t.name for t in manifest.tensors] == ["head", "w0", "w1", "w2", "w3", "w4"]
    assert manifest.buckets[:2] == ("0/00000", "4/00000")
    assert set(manifest.senders) == {0, 4}
    assert len(manifest.senders) == len(manifest.buckets) == len(manifest.checksums)
    assert manifest.num_bytes == 36 + sum(t.nbytes for _, t in tensors(5))
    assert split_parts(manifest) == sorted(parts, key=lambda p: p.sender)


def test_every_chunk_is_checked_before_a_tensor_of_it_is_loaded():
    named, loaded = tensors(), []
    whole = part(2, named, 500)
    load = CheckedLoad(7, whole, lambda chunk: loaded.extend(n for n, _ in chunk))
    start = 0
    for count in whole.counts[:-1]:
        load(named[start : start + count])
        start += count
    broken = [(n, t.clone()) for n, t in named[start:]]
    broken[0][1].view(-1)[3] += 1
    assert loaded == [n for n, _ in named[:start]]
    number = len(whole.counts) - 1
    with pytest.raises(WeightsError, match=rf"version 7, bucket 2/{number:05d}: checksum"):
        load(broken)
    assert loaded == [n for n, _ in named[:start]]


def test_the_checksum_sees_values_places_names_and_lengths():
    rng = torch.Generator().manual_seed(0)
    t = torch.randint(0, 256, (3 * 2**23 + 5,), generator=rng, dtype=torch.uint8)
    expected = int(word_sum(t))
    assert int(word_sum(t.clone())) == expected
    for place in (0, 7, 2**23 - 1, 2**23, len(t) - 1):
        other = t.clone()
        other[place] ^= 1
        assert int(word_sum(other)) != expected
    swapped = t.clone()
    swapped[:8], swapped[8:16] = t[8:16], t[:8]
    assert int(word_sum(swapped)) != expected
    blocks = torch.cat([t[2**23 : 2**24], t[: 2**23], t[2**24 :]])
    assert int(word_sum(blocks)) != expected
    assert int(word_sum(torch.cat([t, t.new_zeros(1)]))) != expected
    infos = [tensor_info("a", torch.ones(2, 3)), tensor_info("b", torch.ones(4))]
    renamed = [tensor_info("a", torch.ones(3, 2)), infos[1]]
    assert device_checksum(infos, [1, 2]) != device_checksum(infos, [2, 1])
    assert device_checksum(infos, [1, 2]) != device_checksum(renamed, [1, 2])
    assert int(word_sum(torch.zeros(0))) == 0


def test_a_sum_does_not_depend_on_layout_in_memory():
    t = torch.randn(40, 50)
    assert int(word_sum(t)) == int(word_sum(t.T.contiguous().T))


def test_vllms_workers_come_after_the_sender_in_the_order_of_their_ranks(monkeypatch):
    # What `NcclReceiver` computes is what vLLM's own engines compute with `rank_offset` 1.
    nccl_common = pytest.importorskip("vllm.distributed.weight_transfer.nccl_common")
    from types import SimpleNamespace

    from megatron_rl.weights.rendezvous import NOWHERE
    from megatron_rl.weights.transports.nccl import NcclReceiver
    from megatron_rl.weights.transports.requests import ReceivingWorker

    seen = []
    monkeypatch.setattr(
        nccl_common, "uid_init_process_group", lambda uid, rank, size, device: (rank, size)
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    for worker in range(4):
        info = nccl_common.NCCLWeightTransferInitInfo(
            rank_offset=1,
            world_size=5,
            nccl_unique_id_b64=base64.b64encode(bytes(128)).decode(),
        )
        layout = SimpleNamespace(data_parallel_index=0, world_size=4, rank=worker)
        receiver = NcclReceiver(ReceivingWorker(NOWHERE, 0, worker, 4, 1.0))
        seen.append((receiver._worker.rank, receiver._worker.ranks))
        assert nccl_common.worker_init_process_group(info, layout) == seen[-1]
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5)]


@pytest.mark.gpu
def test_sums_on_a_gpu_equal_those_on_the_cpu():
    for _, t in tensors():
        assert int(word_sum(t)) == int(word_sum(t.cuda()))


@pytest.mark.gpu
def test_a_version_travels_between_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: NCCL takes one per rank")
    from tests.weights.nccl_pair import travels

    assert travels(tensors(), versions=3, bucket_bytes=500)
