"""Prepare a trainer process for its GPU, before anything touches CUDA; imports no Megatron."""

import os

import torch

from megatron_rl.config import Parallel
from megatron_rl.config.sections import Precision
from megatron_rl.kernels import transformer_engine


def prepare(parallel: Parallel, precision: Precision) -> None:
    """Set what torch and CUDA read once, and load Transformer Engine; variables that are set stay.

    Products of fp32 operands (routers, fp32 parameters) are fp32, whatever the environment sets.

    Raises:
        RuntimeError: a Transformer Engine that cannot be used.
    """
    # NVIDIA's images start torch with TF32 allowed (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE).
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if torch.version.cuda is None:
        return
    # Micro-batches differ in shape: without it the allocator's blocks do not fit the next one.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # Megatron overlaps their messages with products by the order of launches.
    if max(parallel.tensor, parallel.context) > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Transformer Engine asks cuBLAS for TF32 when all operands are fp32.
    if precision.logits != "tf32":
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    transformer_engine.general_gemm()
