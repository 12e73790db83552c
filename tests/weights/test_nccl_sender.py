"""A sender's memory by `nccl`: buffers of one engine at a time, host memory that versions reuse.

CUDA's host registration, the communicator and vLLM's producer are stand-ins with the real
signatures; the publisher, its links and its retention are the real ones.
"""

from __future__ import annotations

import inspect
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.rendezvous import NOWHERE
from megatron_rl.weights.transports import nccl
from megatron_rl.weights.transports.requests import TransferRequest

ENGINES = 6


class Cudart:
    """The calls of `torch.cuda.cudart()` that pin memory."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.error = 0

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:
        assert flags == 0 and ptr not in self.pinned
        self.pinned[ptr] = size
        return self.error

    def cudaHostUnregister(self, ptr: int) -> int:
        del self.pinned[ptr]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Any:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield cudart
    dist.destroy_process_group()


def test_versions_take_their_own_bytes_of_host_memory_and_reuse_it(cudart: Cudart) -> None:
    # 3 x 5 x 4 and 1000 x 2 bytes: no powers of two.
    shapes = {"a": ((3, 5), torch.float32), "b": ((1000,), torch.bfloat16)}
    publisher = nccl.NcclPublisher(NOWHERE, 0, 0, 1, 1.0)
    for version in range(6):
        publisher.release(version - 2)
        stream = ((n, torch.full(s, float(version), dtype=t)) for n, (s, t) in shapes.items())
        manifest = publisher.publish(version, stream, 100)
        assert manifest is not None and manifest.num_bytes == 2060
    # The two newest, and the one that a new version fills.
    assert sum(cudart.pinned.values()) == 3 * 2060
    for version in (4, 5):
        held = dict(publisher.tensors(version))
        assert held["a"].shape == (3, 5) and held["b"].dtype == torch.bfloat16
        assert all(bool((tensor == version).all()) for tensor in held.values())
    publisher.close()
    assert cudart.pinned == {}


def test_a_host_that_cannot_pin_the_weights_is_an_error(cudart: Cudart) -> None:
    cudart.error = 2
    publisher = nccl.NcclPublisher(NOWHERE, 0, 0, 1, 1.0)
    with pytest.raises(WeightsError, match="cannot pin 64 bytes.*megatron-rl plan"):
        publisher.publish(0, iter([("a", torch.zeros(16))]), 100)


class Producer:
    """vLLM's packed broadcast: it counts those that hold buffers at the same time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.running, self.most, self.calls = seconds, 0, 0, 0
        self.lock = threading.Lock()

    def __call__(
        self,
        iterator: Any,
        group: Any,
        src: int,
        post_iter_func: Any,
        buffer_size_bytes: int = 0,
        num_buffers: int = 2,
    ) -> None:
        with self.lock:
            self.calls, self.running = self.calls + 1, self.running + 1
            self.most = max(self.most, self.running)
        time.sleep(self.seconds)
        with self.lock:
            self.running -= 1


@pytest.fixture
def links(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function: (seconds of a transfer) -> the producer, and a link for each engine."""
    packed_tensor = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor")
    communicator = SimpleNamespace(destroy=lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(nccl, "connect", lambda unique_id, rank, size, request: communicator)
    monkeypatch.setattr(nccl, "new_unique_id", lambda: bytes(128))

    def make(seconds: float) -> tuple[Producer, list[nccl._SenderLink]]:
        producer, real = Producer(seconds), packed_tensor.packed_nccl_broadcast_producer
        assert [*inspect.signature(producer).parameters] == [*inspect.signature(real).parameters]
        monkeypatch.setattr(packed_tensor, "packed_nccl_broadcast_producer", producer)
        publisher = nccl.NcclPublisher(NOWHERE, 0, 0, 1, 10.0)
        publisher.publish(0, iter([("a", torch.zeros(16))]), 100)
        return producer, [nccl._SenderLink(publisher, 2, 0) for _ in range(ENGINES)]

    return make


def send_all(links: list[nccl._SenderLink], seconds: float) -> list[WeightsError]:
    """Send version 0 on all links at once; return their errors."""
    errors: list[WeightsError] = []

    def send(link: nccl._SenderLink) -> None:
        request = TransferRequest(None, "0/0/", 0, 0, time.monotonic() + seconds)
        link.offer(0)
        try:
            link.send(request)
        except WeightsError as e:
            errors.append(e)

    threads = [threading.Thread(target=send, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_all_engines_at_once_take_the_buffers_of_one(links: Any) -> None:
    producer, all_links = links(0.05)
    assert send_all(all_links, 10.0) == []
    assert (producer.calls, producer.most) == (ENGINES, 1)


def test_a_transfer_whose_turn_does_not_come_in_time_says_so(links: Any) -> None:
    producer, all_links = links(0.6)
    waited = send_all(all_links[:2], 0.3)[0]
    assert "version 0: the transfers to other generators took longer than" in str(waited)
    assert producer.calls == 1
