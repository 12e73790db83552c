"""Checks of the node: memory, ports, the communication of processes, and the way of new weights."""

import contextlib
import errno
import json
import os
import resource
import shutil
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_rl.commands.doctor import Result, read_probe, software_checks
from megatron_rl.commands.plan.layouts import layout_problems
from megatron_rl.commands.plan.nodes import GIB, host_memory
from megatron_rl.commands.plan.tensors import read_architecture, update_bytes
from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.messages import Bucket, Manifest, TensorInfo
from megatron_rl.weights.manifest import WeightsError, checksum
from megatron_rl.weights.store import FOLDER_PREFIX, VERSIONS_HELD, Store, remove_unused

INFINIBAND = Path("/dev/infiniband")
CAP_IPC_LOCK = 14  # of the kernel
RANKS = 2
VALUES = 2**18  # of the version that is written and loaded
ALL_REDUCE = f"""
import sys, datetime, torch, torch.distributed as dist
url, backend, rank = *sys.argv[1:3], int(sys.argv[3])
if backend == "nccl":
    torch.cuda.set_device(rank)
limit = datetime.timedelta(seconds=60)
dist.init_process_group(backend, init_method=url, rank=rank, world_size={RANKS}, timeout=limit)
value = torch.full((1,), rank + 1.0, device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(value)
assert value.item() == {RANKS * (RANKS + 1) / 2}, f"the sum is {{value.item()}}"
dist.destroy_process_group()
"""
"""Program of a rank, which adds rank + 1 over all ranks."""


def check_memory(host_gib: float, *, cuda: bool) -> Result:
    """Report cores and memory; on a GPU node, less than `roles.host_gib` misleads the plan."""
    import psutil

    total = psutil.virtual_memory().total / GIB
    detail = f"{len(os.sched_getaffinity(0))} cores, {total:.0f} GiB of memory"
    if not cuda or total >= host_gib:
        return Result("note", detail)
    remedy = f"set roles.host_gib={total:.0f} where `megatron-rl plan` plans for this node"
    return Result("note", f"{detail}; roles.host_gib is {host_gib:g}", remedy)


def check_open_files() -> Result:
    """Check the hard limit of open files; the orchestrator raises its own limit to it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= 4096:
        return Result("ok", "the limit is high enough")
    return Result(
        "note",
        f"at most {hard} in a process, and the orchestrator needs one for each generator and three"
        " for each verifier worker; for large runs raise the hard limit (docker run --ulimit"
        " nofile=65536, LimitNOFILE= of the service that starts jobs)",
    )


def check_locked_memory() -> Result:
    """Check that RDMA, where there are devices for it, may lock memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
    if limit == resource.RLIM_INFINITY or int(capabilities, 16) >> CAP_IPC_LOCK & 1:
        return Result("ok", "without a limit")
    detail = f"at most {limit / 2**20:g} MiB in a process"
    if not INFINIBAND.exists():
        return Result("note", f"{detail}, and no RDMA devices need more")
    return Result(
        "fail",
        f"{detail}: NCCL and NIXL cannot use the RDMA devices of {INFINIBAND}, and take TCP",
        "docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity of the service that starts jobs"
        " (slurmd, containerd); the capability IPC_LOCK is enough for root only",
    )


def check_shared_memory(folder: Path, versions: float, *, cuda: bool) -> Result:
    """Check for space for bytes of weight versions, NCCL and vLLM's queues."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Result("fail", f"{folder} is not a writable folder", "mount a tmpfs there")
    remove_unused(folder, FOLDER_PREFIX)  # of runs that were killed, as the next run does
    free, needed = shutil.disk_usage(folder).free, (8 if cuda else 0.25) * GIB + versions
    if free >= needed:
        return Result("ok", f"{folder}: {free / GIB:.1f} GiB free")
    return Result(
        "fail",
        f"{folder} has {free / GIB:.2f} GiB free; {needed / GIB:.2f} GiB are needed, of them"
        f" {versions / GIB:.2f} for versions of the weights",
        "docker run --ipc=host (or --shm-size=); in Kubernetes an emptyDir with medium Memory on"
        " /dev/shm; on the host mount -o remount,size=; or set weights.directory to another folder",
    )


def check_loopback() -> Result:
    """Check the node's own interface, which the orchestrator and gloo use."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError as e:
        return Result("fail", f"127.0.0.1 does not connect: {e}", "bring the interface lo up")
    return Result("ok", "127.0.0.1 connects")


def check_port(port: int) -> Result:
    """Check that a port can be bound; other nodes connect to it."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError as e:
            detail = f"cannot be bound: {e.strerror}"
            if e.errno == errno.EADDRINUSE:
                detail = f"in use{_holder(port)}"
            remedy = "end that process, or use another port above 1023 for torchrun ("
            remedy += "--rdzv-endpoint HOST:PORT, MASTER_PORT; --standalone picks a free one)"
            return Result("fail", detail, remedy)
    return Result("ok", "free")


def _holder(port: int) -> str:
    """Return the process that listens on a port; without root it may be invisible."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for c in psutil.net_connections("tcp"):
            if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid is not None:
                return f" by process {c.pid} ({psutil.Process(c.pid).name()})"
    return ""


def check_all_reduce(*, cuda: bool) -> dict[str, Result]:
    """Let `RANKS` processes add numbers, over NCCL if there are enough GPUs, else over gloo."""
    import torch

    backend = "nccl" if cuda and torch.cuda.device_count() >= RANKS else "gloo"
    name = f"all-reduce of {RANKS} ranks ({backend})"
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(RANKS) as pool:
        command = [sys.executable, "-c", ALL_REDUCE, f"file://{folder}/rendezvous", backend]
        commands = [[*command, str(rank)] for rank in range(RANKS)]
        errors = [error for _, error in pool.map(software_checks.output_of, commands) if error]
    if not errors:
        return {name: Result("ok", "the sum is right on every rank")}
    remedy = "the host's name may not resolve: set GLOO_SOCKET_IFNAME to an interface that is up"
    if backend == "nccl":
        remedy = "set NCCL_DEBUG=INFO and NCCL_SOCKET_IFNAME, and try again"
    return {name: Result("fail", errors[0], remedy)}


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
    """Check that a version in a store below `root` (page-locked with `cuda`) is loaded as it is."""
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
    detail += "" if needed else "; only runs on several nodes need it"
    return Result("fail" if needed else "note", detail, remedy)
