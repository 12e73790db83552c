"""Checks of the way of new weights: memory, stores, and one-sided reads between processes."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from megatron_rl.commands.doctor import Result, read_probe, software_checks
from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.messages import Bucket, Manifest, TensorInfo
from megatron_rl.weights.manifest import WeightsError, checksum
from megatron_rl.weights.store import FOLDER_PREFIX, SHARED_MEMORY, VERSIONS_HELD, Store

SECONDS = 60.0
"""Time limit of the source of a read, until it is ready; importing NIXL takes a few."""
VALUES = 2**18


def stored_bytes(run: RunConfig) -> tuple[float, float]:
    """Return the bytes of versions in the fullest node's shared memory, and in weights.directory.

    Zeros if the model's configuration is not here, or its layout does not divide it: starting the
    run, and `megatron-rl plan`, say so.
    """
    from megatron_rl.commands.plan.host_memory import host_memory
    from megatron_rl.commands.plan.layouts import layout_problems
    from megatron_rl.commands.plan.plan_report import read_architecture
    from megatron_rl.commands.plan.tensors import update_bytes

    try:
        architecture = read_architecture(run)
    except ConfigError:
        return 0.0, 0.0
    if layout_problems(run, architecture):
        return 0.0, 0.0
    shared = max(host.shared for host in host_memory(run, architecture))
    return shared, VERSIONS_HELD * update_bytes(run, architecture)


def check_directory(folder: Path, num_bytes: float) -> Result:
    """Check `weights.directory` for space for its versions."""
    import shutil

    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as e:
        return Result("fail", str(e), "set weights.directory to a folder that all nodes can write")
    if free >= num_bytes:
        return Result("ok", f"{folder}: {free / 1e9:.0f} GB free, {num_bytes / 1e9:.1f} needed")
    detail = f"{folder} has {free / 1e9:.1f} GB free; {num_bytes / 1e9:.1f} GB are needed"
    return Result("fail", detail, "set weights.directory to a larger file system, or leave it out")


def check_store(root: Path, *, cuda: bool) -> Result:
    """Check that a version in a store below `root` is loaded bit for bit, as a generator does it.

    With `cuda`, its memory is page-locked, too.
    """
    import torch

    from megatron_rl.weights.loading import NodeStores

    values = torch.arange(VALUES, dtype=torch.int32).view(torch.float32)
    data = values.view(torch.uint8).numpy()
    info = TensorInfo(name="x", dtype="float32", shape=(VALUES,))
    bucket = Bucket(0, (info,), data.size, checksum(data))
    try:
        with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}doctor_", dir=root) as folder:
            store = Store(Path(folder) / "0", [data.size])
            store.bucket(0, 0)[:] = data
            store.header.versions_2N[0] = 1
            manifest = Manifest(version=1, buckets=(bucket,), root=folder, nodes=())
            stores = NodeStores(pinned=cuda)
            with stores.checked(manifest, "", seconds=5.0):
                loaded = {name: tensor.clone() for name, tensor in stores.tensors(manifest, "")}
    except (OSError, WeightsError) as e:
        remedy = f"give {root} free space and locks (flock), or set weights.directory elsewhere"
        return Result("fail", str(e), remedy)
    if np.array_equal(loaded["x"].view(torch.uint8).numpy(), data):
        return Result("ok", f"{data.size / 2**20:g} MiB through {root}")
    return Result("fail", "loaded other weights", f"check the file system of {root}")


def check_reads(python: str, *, needed: bool) -> Result:
    """Let the generators' interpreter `python` read this one's memory through NIXL.

    A failure is a note unless the run needs it: it has several nodes and no weights.directory.
    """
    result = _read(python)
    if result.status == "fail" and not needed:
        return Result("note", f"{result.detail}; only runs on several nodes need it", result.remedy)
    return result


def _read(python: str) -> Result:
    remedy = (
        "pip install nixl-cu13 in both environments, and set UCX_LOG_LEVEL=info for UCX's own"
        " reasons; or set weights.directory to a folder that all nodes share"
    )
    command = ["-P", "-m", read_probe.__name__]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        ) as source,
    ):  # fmt: skip
        assert source.stdin is not None and source.stdout is not None
        try:
            ready, _, _ = select.select([source.stdout], [], [], SECONDS)
            line = source.stdout.readline() if ready else ""
            if not line:
                errors.seek(0)
                last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                last = last or f"the source was not ready within {SECONDS:g} s"
                return Result("fail", f"{sys.executable}: {last}", remedy)
            text, error = software_checks.output_of([python, *command, line])
        finally:
            source.kill()
    if error:
        return Result("fail", f"{python}: {error}", remedy)
    rate = json.loads(text.rpartition(read_probe.MARK)[2])
    return Result(
        "ok", f"{read_probe.NUM_BYTES / 2**20:g} MiB at {rate / 1e9:.1f} GB/s on this node"
    )


def store_folder(run: RunConfig) -> Path:
    """Return the folder in which the trainer's ranks keep versions."""
    return run.weights.directory or SHARED_MEMORY


def needs_reads(run: RunConfig) -> bool:
    """Return True if nodes of this run take versions from others."""
    from megatron_rl.commands.plan.nodes import nodes_of

    return bool(nodes_of(run).stores)
