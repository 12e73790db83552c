"""The transport `gloo`, trainer and workers in one process: deliveries, refusals, time-outs."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta

import msgspec
import pytest
import torch
import torch.distributed as dist

from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.rendezvous import Rendezvous
from megatron_rl.weights.transports.gloo import GlooPublisher, GlooReceiver
from megatron_rl.weights.transports.requests import ReceivingWorker

SECONDS = 20.0
SHORT = 1.0


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"model.layers.{i}.weight": torch.randn(64, 96, generator=generator) for i in range(9)
    }
    weights["model.norm.weight"] = torch.randn(33, generator=generator).bfloat16()
    weights["lm_head.weight"] = torch.randn(96, 64, generator=generator).T  # not contiguous
    return weights


@pytest.fixture(scope="module")
def host() -> dist.TCPStore:
    """Return a store as torchrun's agent hosts it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def rendezvous(host: dist.TCPStore, request: pytest.FixtureRequest) -> Rendezvous:
    return Rendezvous("127.0.0.1", host.port, request.node.name)


def receivers(rendezvous: Rendezvous, engine: int = 0, workers: int = 1, seconds: float = SECONDS):
    return [
        GlooReceiver(ReceivingWorker(rendezvous, engine, w, workers, seconds))
        for w in range(workers)
    ]


def wait(receiver: GlooReceiver, seconds: float = SECONDS) -> None:
    limit = time.monotonic() + seconds
    while not receiver.poll():
        assert time.monotonic() < limit
        time.sleep(0.002)


def taken(receiver: GlooReceiver, manifest) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    receiver.load(manifest, lambda weights: found.update(weights))
    return found


def failure(publisher: GlooPublisher, seconds: float = SECONDS) -> str:
    """Return the trainer's error, at the latest after `seconds`."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            publisher.raise_if_failed()
        except WeightsError as e:
            return str(e)
        time.sleep(0.01)
    raise AssertionError("the trainer was told nothing")


@pytest.mark.parametrize("bucket_bytes", [1, 60_000, 2**30])
def test_workers_of_two_engines_receive_what_was_published(rendezvous, bucket_bytes):
    publisher = GlooPublisher(rendezvous, engines=2, workers=2, seconds=SECONDS)
    engines = [receivers(rendezvous, engine, workers=2) for engine in range(2)]
    for version in range(3):
        expected = tensors(version)
        manifest = publisher.publish(version, iter(expected.items()), bucket_bytes)
        for workers in engines:
            for worker in workers:
                worker.begin(manifest)
        for worker in engines[0] + engines[1]:
            wait(worker)
            found = taken(worker, manifest)
            assert list(found) == list(expected)
            for name, tensor in found.items():
                assert tensor.dtype == expected[name].dtype
                assert torch.equal(tensor, expected[name])
        publisher.raise_if_failed()
    assert len(manifest.buckets) == {1: 11, 60_000: 5, 2**30: 1}[bucket_bytes]
    publisher.close()


def test_versions_stay_until_they_are_released_and_a_gone_one_is_refused_on_both_ends(rendezvous):
    publisher = GlooPublisher(rendezvous, 1, 1, SECONDS)
    (receiver,) = receivers(rendezvous)
    manifests = [publisher.publish(v, iter(tensors(v).items()), 2**20) for v in range(4)]
    assert publisher.versions == (0, 1, 2, 3)
    publisher.release(1)
    assert publisher.versions == (2, 3)
    receiver.begin(manifests[0])
    with pytest.raises(WeightsError, match=r"version 0, trainer rank 0: only versions \[2, 3\]"):
        wait(receiver)
    assert "weights version 0 did not reach generator 0" in failure(publisher)
    receiver.begin(manifests[2])  # the next request is served as ever
    wait(receiver)
    assert torch.equal(taken(receiver, manifests[2])["lm_head.weight"],
                       tensors(2)["lm_head.weight"])  # fmt: skip
    with pytest.raises(WeightsError, match="version 3 was published after version 3"):
        publisher.publish(3, iter(tensors().items()), 2**20)
    with pytest.raises(WeightsError, match="yielded lm_head.weight twice"):
        publisher.publish(4, iter([*tensors().items(), *tensors().items()][10:]), 2**20)
    publisher.close()


def test_changed_bytes_are_refused_before_anything_is_loaded_and_the_trainer_is_told(rendezvous):
    publisher = GlooPublisher(rendezvous, 1, 2, SECONDS)
    workers = receivers(rendezvous, workers=2)
    manifest = publisher.publish(5, iter(tensors().items()), 60_000)
    publisher._held[5][1][7] ^= 1
    for worker in workers:
        worker.begin(manifest)
    for worker in workers:
        with pytest.raises(WeightsError, match=r"version 5, bucket 00001: checksum .* says"):
            wait(worker)
        with pytest.raises(WeightsError, match="version 5 was not received"):
            taken(worker, manifest)
    said = failure(publisher)
    assert "version 5 did not reach generator 0: weights version 5, worker 0: " in said
    assert "bucket 00001: checksum" in said
    publisher.close()


def test_a_truncated_bucket_is_refused_before_a_byte_travels(rendezvous):
    publisher = GlooPublisher(rendezvous, 1, 1, SECONDS)
    (receiver,) = receivers(rendezvous)
    manifest = publisher.publish(5, iter(tensors().items()), 60_000)
    publisher._held[5][0] = publisher._held[5][0][:-16]
    receiver.begin(manifest)
    with pytest.raises(WeightsError, match=r"version 5: the trainer sends buckets of .* truncated"):
        wait(receiver)
    assert "truncated" in failure(publisher)
    publisher.close()


def test_another_shape_than_that_of_the_bytes_is_refused(rendezvous):
    publisher = GlooPublisher(rendezvous, 1, 1, SECONDS)
    (receiver,) = receivers(rendezvous)
    manifest = publisher.publish(5, iter(tensors().items()), 60_000)
    wrong = msgspec.structs.replace(manifest.tensors[0], shape=(64, 80))
    receiver.begin(msgspec.structs.replace(manifest, tensors=(wrong, *manifest.tensors[1:])))
    with pytest.raises(WeightsError, match="truncated"):
        wait(receiver)
    assert "truncated" in failure(publisher)
    publisher.close()


def test_a_trainer_that_says_nothing_is_named_within_the_time_out(rendezvous):
    publisher = GlooPublisher(rendezvous, 1, 1, SECONDS)
    manifest = publisher.publish(5, iter(tensors().items()), 2**20)
    other = Rendezvous(rendezvous.host, rendezvous.port, "nobody serves here")
    (receiver,) = receivers(other, seconds=SHORT)
    began = time.monotonic()
    receiver.begin(manifest)
    with pytest.raises(WeightsError, match=r"version 5: trainer rank 0 said nothing within"):
        wait(receiver, 2 * SECONDS)  # connecting to the store has its own limit
    assert SHORT <= time.monotonic() - began < 2 * SECONDS
    publisher.close()


def test_a_worker_that_never_joins_ends_the_transfer_for_both_within_the_time_out(rendezvous):
    publisher = GlooPublisher(rendezvous, engines=1, workers=2, seconds=SHORT)
    first, _second = receivers(rendezvous, workers=2, seconds=SHORT)
    manifest = publisher.publish(5, iter(tensors().items()), 2**20)
    began = time.monotonic()
    first.begin(manifest)
    with pytest.raises(WeightsError, match=r"version 5: worker 1 said nothing|trainer rank 0 said"):
        wait(first)
    assert "version 5 did not reach generator 0" in failure(publisher)
    assert time.monotonic() - began < 3 * SHORT + 5
    publisher.close()


WORKER = """
import os, sys, time
from megatron_rl.weights.rendezvous import Rendezvous
from megatron_rl.weights.transports import gloo
rendezvous = Rendezvous("127.0.0.1", int(sys.argv[1]), sys.argv[2])
broadcast, calls = gloo._broadcast, []
def die_at_the_third(group, flat):
    calls.append(1)
    if len(calls) == 3:
        os._exit(1)
    broadcast(group, flat)
gloo._broadcast = die_at_the_third
import msgspec
from megatron_rl.messages import Manifest
from megatron_rl.weights.transports.requests import ReceivingWorker
receiver = gloo.GlooReceiver(ReceivingWorker(rendezvous, 0, 0, 1, 20.0))
receiver.begin(msgspec.json.decode(sys.stdin.buffer.read(), type=Manifest))
time.sleep(60)
"""


def test_a_worker_that_dies_half_way_is_reported_to_the_trainer_at_once(rendezvous):
    publisher = GlooPublisher(rendezvous, 1, 1, seconds=250.0)
    big = {f"w{i}": torch.zeros(2**20) for i in range(8)}
    manifest = publisher.publish(5, iter(big.items()), 2**22)
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(rendezvous.port), rendezvous.prefix],
        stdin=subprocess.PIPE,
    )
    try:
        process.communicate(msgspec.json.encode(manifest), timeout=200)
        ended = time.monotonic()
        assert "version 5 did not reach generator 0: the transfer broke off" in failure(
            publisher, 50
        )
        assert time.monotonic() - ended < 50  # and not the 250 s of the time-out
    finally:
        process.kill()
        process.wait()
    publisher.close()


def test_closing_ends_the_service_and_needs_no_store_that_is_gone():
    host = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    publisher = GlooPublisher(Rendezvous("127.0.0.1", host.port, "gone"), 1, 1, seconds=2.0)
    del host
    limit = time.monotonic() + SECONDS
    while not publisher._services[0]._service.done():
        assert time.monotonic() < limit
        time.sleep(0.01)
    publisher.close()
