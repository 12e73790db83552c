"""Checks of the way of new weights: memory, stores, and one-sided reads between processes."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from megatron_rl.commands.doctor import Result, read_probe, software_checks
from megatron_rl.commands.plan.layouts import layout_problems
from megatron_rl.commands.plan.nodes import host_memory
from megatron_rl.commands.plan.plan_report import read_architecture
from megatron_rl.commands.plan.tensors import update_bytes
from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.messages import Bucket, Manifest, TensorInfo
from megatron_rl.weights.manifest import WeightsError, checksum
from megatron_rl.weights.store import FOLDER_PREFIX, VERSIONS_HELD, Store

VALUES = 2**18


def stored_bytes(run: RunConfig) -> tuple[float, float]:
    """Return the bytes of versions in the fullest node's shared memory, and in weights.directory.

    Zeros without the model's configuration or a layout that divides it: `megatron-rl plan` says so.
    """
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

    values = torch.arange(VALUES, dtype=torch.float32)
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
    if loaded["x"].equal(values):
        return Result("ok", f"{data.size / 2**20:g} MiB through {root}")
    return Result("fail", "loaded other weights", f"check the file system of {root}")


def check_reads(python: str, *, needed: bool) -> Result:
    """Let the interpreter `python` read this one's memory through NIXL; not `needed`: a note."""
    module = ["-P", "-m", read_probe.__name__]
    text, error = software_checks.output_of([sys.executable, *module, python, *module])
    if not error:
        rate = json.loads(text.rpartition(read_probe.MARK)[2]) / 1e9
        size = read_probe.NUM_BYTES / 2**20
        return Result("ok", f"{size:g} MiB at {rate:.1f} GB/s on this node")
    remedy = (
        "pip install nixl-cu13 in both environments, and set UCX_LOG_LEVEL=info for UCX's own"
        " reasons; or set weights.directory to a folder that all nodes share"
    )
    detail = f"{python} reads the memory of {sys.executable}: {error}"
    if needed:
        return Result("fail", detail, remedy)
    return Result("note", f"{detail}; only runs on several nodes need it", remedy)
