"""A sender and a worker, each on a GPU of its own, that exchange versions by NCCL."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.messages import Manifest
from megatron_rl.weights.rendezvous import Rendezvous

SECONDS = 60.0
Named = list[tuple[str, torch.Tensor]]


def _changed(named: Named, version: int) -> Named:
    return [(n, t + version) for n, t in named]


def _sends(port: int, named: Named, versions: int, bucket_bytes: int, pipe: Any) -> None:
    from megatron_rl.weights.transports.nccl import NcclPublisher

    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    publisher = NcclPublisher(Rendezvous("127.0.0.1", port, "pair"), 0, 1, 1, SECONDS)
    for version in range(versions):
        on_gpu = ((n, t.cuda()) for n, t in _changed(named, version))
        pipe.send(publisher.publish(version, on_gpu, bucket_bytes))
        assert pipe.recv() == version
    publisher.close()
    dist.destroy_process_group()


def _receives(port: int, named: Named, pipe: Any) -> None:
    from megatron_rl.weights.transports.nccl import NcclReceiver
    from megatron_rl.weights.transports.requests import ReceivingWorker

    torch.cuda.set_device(1)
    receiver = NcclReceiver(
        ReceivingWorker(Rendezvous("127.0.0.1", port, "pair"), 0, 0, 1, SECONDS)
    )
    while (manifest := pipe.recv()) is not None:
        assert isinstance(manifest, Manifest)
        chunks: list[list[tuple[str, torch.Tensor]]] = []
        receiver.load(manifest, chunks.append)
        found = {name: tensor.cpu() for chunk in chunks for name, tensor in chunk}
        expected = dict(_changed(named, manifest.version))
        same = found.keys() == expected.keys()
        pipe.send(same and all(torch.equal(found[n], expected[n]) for n in expected))
    receiver.close()


def travels(named: Named, versions: int, bucket_bytes: int) -> bool:
    """Whether every version arrived, bit by bit."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    (to_sender, sender), (to_receiver, receiver) = spawn.Pipe(), spawn.Pipe()
    processes = [
        spawn.Process(target=_sends, args=(store.port, named, versions, bucket_bytes, sender)),
        spawn.Process(target=_receives, args=(store.port, named, receiver)),
    ]
    for process in processes:
        process.start()
    try:
        arrived = []
        for version in range(versions):
            assert to_sender.poll(SECONDS)
            to_receiver.send(to_sender.recv())
            assert to_receiver.poll(SECONDS)
            arrived.append(to_receiver.recv())
            to_sender.send(version)
        to_receiver.send(None)
        for process in processes:
            process.join(SECONDS)
        return all(arrived) and all(process.exitcode == 0 for process in processes)
    finally:
        for process in processes:
            process.kill()
