"""What the node gives: ports and shared memory."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
from pathlib import Path

from megatron_rl.commands.doctor.result import Result, fail, note, ok

RENDEZVOUS_PORT = 29500
"""torchrun's default."""
SHARED_MEMORY = Path("/dev/shm")
GIB = 2**30


def check_port(port: int) -> Result:
    """Whether a port that other nodes are told can be bound here."""
    check = f"port {port}"
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return fail(
                    check,
                    f"in use{_holder(port)}",
                    "end that process, or give torchrun another port (--rdzv-endpoint HOST:PORT,"
                    " MASTER_PORT; --standalone takes a free one)",
                )
            return fail(check, f"cannot be bound: {e.strerror}", "take a port above 1023")
    return ok(check, "free")


def _holder(port: int) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                if connection.pid is None:
                    return ""
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:  # only root sees whose it is
        return ""
    return ""


def check_loopback() -> Result:
    """The orchestrator and gloo talk over this node's own interface."""
    check = "loopback"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError as e:
        return fail(check, f"127.0.0.1 does not connect: {e}", "bring the interface lo up")
    return ok(check, "127.0.0.1 connects")


def check_shared_memory(folder: Path = SHARED_MEMORY, *, cuda: bool) -> Result:
    """Room for weights, NCCL and vLLM's queues; Docker's default of 64 MB is too little."""
    check = "shared memory"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return fail(check, f"{folder} is not a writable folder", "mount a tmpfs there")
    free = shutil.disk_usage(folder).free
    wanted = (8 if cuda else 0.25) * GIB
    if free < wanted:
        return fail(
            check,
            f"{folder} has {free / GIB:.2f} GiB free; {wanted / GIB:g} GiB are needed",
            "docker run --ipc=host (or --shm-size=16g); in Kubernetes an emptyDir with medium"
            " Memory on /dev/shm; or give weights.directory another folder",
        )
    return ok(check, f"{folder}: {free / GIB:.1f} GiB free")


def check_open_files() -> Result:
    """The orchestrator raises its own limit to the hard one."""
    check = "open files"
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= 4096:
        return ok(check, "as many as a process may want")
    return note(
        check,
        f"at most {hard} in a process, and the orchestrator holds one for each generator and three"
        " for each verifier worker; for large runs raise the hard limit (docker run --ulimit"
        " nofile=65536, LimitNOFILE= of the service that starts jobs)",
    )


def check_memory() -> Result:
    """For the reader: cores and memory."""
    import psutil

    total = psutil.virtual_memory().total / GIB
    return note("machine", f"{len(os.sched_getaffinity(0))} cores, {total:.0f} GiB of memory")
