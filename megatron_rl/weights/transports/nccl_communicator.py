"""vLLM's NCCL communicator with the time-outs that NCCL lacks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import torch

from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.transports.requests import TransferRequest, in_background


def new_unique_id() -> bytes:
    """Return an id for a new communicator."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


def connect(unique_id: bytes, rank: int, size: int, request: TransferRequest) -> Any:
    """Return the communicator of this id, which all members make at the same time.

    Raises:
        WeightsError: a member was missing at the request's deadline.
    """
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    device = torch.cuda.current_device()

    def make() -> Any:
        torch.cuda.set_device(device)
        return uid_init_process_group(unique_id, rank, size, device)

    communicator = in_background(make, "NCCL communicator")
    if futures.wait([communicator], request.seconds_left).not_done:
        raise WeightsError(
            f"weights version {request.version}: no NCCL communicator between the {size} members"
            " within timeouts.transfer_seconds"
        )
    return communicator.result()


@contextmanager
def bounded(communicator: Any, request: TransferRequest) -> Iterator[None]:
    """Abort the body of the `with` statement at the request's deadline.

    Raises:
        WeightsError: it was aborted.
    """
    late = threading.Event()

    def abort() -> None:
        late.set()
        communicator.destroy()

    timer = threading.Timer(request.seconds_left, abort)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if late.is_set():
            raise WeightsError(
                f"weights version {request.version}: the transfer by NCCL took longer than"
                " timeouts.transfer_seconds and was aborted"
            )
