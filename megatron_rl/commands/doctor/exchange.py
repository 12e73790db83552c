"""Two things a run lives on, done once in small: an all-reduce, and weights that come back."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_rl.commands.doctor.child import ProcessFailed, last_line
from megatron_rl.commands.doctor.result import Result, fail, ok

RANKS = 2
SECONDS = 120.0


def check_all_reduce(*, cuda: bool) -> Result:
    """Two ranks add their numbers, over NCCL where there are two GPUs, else over gloo."""
    import subprocess

    backend = "gloo"
    if cuda:
        import torch

        backend = "nccl" if torch.cuda.device_count() >= RANKS else "gloo"
    check = f"all-reduce of {RANKS} ranks ({backend})"
    with tempfile.TemporaryDirectory(prefix="megatron_rl_doctor_") as folder:
        command = [sys.executable, "-m", "megatron_rl.commands.doctor.rank"]
        logs = [Path(folder) / f"{rank}.log" for rank in range(RANKS)]
        processes = []
        try:
            for rank, path in enumerate(logs):
                arguments = [str(rank), str(RANKS), f"file://{folder}/rendezvous", backend]
                with path.open("wb") as log:
                    processes.append(
                        subprocess.Popen([*command, *arguments], stdout=log, stderr=log)
                    )
            for rank, process in enumerate(processes):
                if process.wait(SECONDS):
                    raise ProcessFailed(f"rank {rank}: {last_line(logs[rank].read_text())}")
        except (ProcessFailed, subprocess.TimeoutExpired) as e:
            remedy = (
                "set NCCL_DEBUG=INFO and NCCL_SOCKET_IFNAME, and try again"
                if backend == "nccl"
                else "the host's name may not resolve: set GLOO_SOCKET_IFNAME to an interface that"
                " is up (lo on one node)"
            )
            why = str(e) if isinstance(e, ProcessFailed) else f"no end within {SECONDS:.0f} s"
            return fail(check, why, remedy)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait(10)
    return ok(check, "the sum is right on every rank")


def check_weight_transfer(root: Path) -> Result:
    """A version of weights goes out by the transport `disk` and comes back, bit for bit."""
    import torch

    from megatron_rl.weights.manifest import WeightsError
    from megatron_rl.weights.transports.disk import DiskPublisher, DiskReceiver

    check = "weight transfer (disk, loop-back)"
    sent = {
        "model.embed_tokens.weight": torch.arange(4096, dtype=torch.float32).reshape(64, 64),
        "lm_head.weight": torch.full((64, 64), 1 / 3, dtype=torch.bfloat16),
    }
    received: dict[str, torch.Tensor] = {}
    try:
        publisher = DiskPublisher(root / f"megatron_rl_doctor_{os.getpid()}")
        try:
            manifest = publisher.publish(1, iter(sent.items()), 16 * 1024)
            receiver = DiskReceiver()
            receiver.begin(manifest)
            receiver.load(manifest, lambda stream: received.update(_cloned(stream)))
        finally:
            publisher.close()
    except (OSError, WeightsError) as e:
        return fail(check, str(e), f"give weights.directory a folder with room ({root} has none)")
    same = sent.keys() == received.keys() and all(sent[n].equal(received[n]) for n in sent)
    if not same:
        return fail(check, "other weights came back", f"check the file system of {root}")
    return ok(check, f"{len(sent)} tensors through {root}")


def _cloned(stream: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in stream}
