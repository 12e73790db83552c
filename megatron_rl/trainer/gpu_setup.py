"""Prepare a trainer process for its GPU, before anything touches CUDA; imports no Megatron."""

import os

import torch

from megatron_rl.config import Parallel
from megatron_rl.kernels import transformer_engine


def prepare(parallel: Parallel) -> None:
    """Set what torch and CUDA read once, and load Transformer Engine; variables that are set stay.

    Raises:
        RuntimeError: a Transformer Engine that cannot be used.
    """
    if torch.version.cuda is None:
        return
    # Micro-batches differ in shape: without it the allocator's blocks do not fit the next one.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # Megatron overlaps their messages with products by the order of launches.
    if max(parallel.tensor, parallel.context) > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    transformer_engine.general_gemm()
