"""Upstream notices that a user of `megatron_rl` need not act on, silenced one by one.

All other notices are shown; `MEGATRON_RL_VERBOSE=1` shows these as well.
"""

import logging
import os
import sys
import warnings

LOG_LINES: dict[str, tuple[str, ...]] = {
    "megatron.core.models.gpt.gpt_model": ("GPTModel IS DEPRECATED",),
    "megatron.core.distributed.distributed_data_parallel": ("full_param_layout not provided",),
    "torch.utils.cpp_extension": ("No CUDA runtime is found",),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCore's async save is deprecated",),
    "vllm.triton_utils.importing": ("Triton is installed, but doesn't include CPU backend",),
}
WARNINGS = (
    "Apex is not installed. Falling back to Torch Norm",
    "Transformer Engine and Apex are not installed",
    "full scope is deprecated",
    "MimoModelConfig is experimental",
    "When using async grad allreduce",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.distributed.*` is deprecated",
    "torch.distributed is disabled, unavailable or uninitialized",
    "The argument order of load has been changed",
    "Please use DTensor instead and we are deprecating ShardedTensor",
)
"""Starts of warnings (regular expressions), of Megatron-Core and of torch when it is the caller."""


def silence_notices() -> None:
    """Silence the notices in this process; safe to repeat."""
    if os.environ.get("MEGATRON_RL_VERBOSE") == "1":
        return
    # The lock of a progress bar, in a process of vLLM's that is ended with its engine.
    ignore_in_processes("ignore:resource_tracker:UserWarning")
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message.replace("(", r"\("))
    for name in LOG_LINES:
        logging.getLogger(name).addFilter(_is_shown)


def ignore_in_processes(*filters: str) -> None:
    """Add filters to PYTHONWARNINGS, for Python processes that are started later."""
    present = [f for f in os.environ.get("PYTHONWARNINGS", "").split(",") if f]
    os.environ["PYTHONWARNINGS"] = ",".join([*present, *(f for f in filters if f not in present)])


def _is_shown(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in LOG_LINES[record.name])


def show_own_notices() -> None:
    """Print the INFO lines of `megatron_rl.*`, as they are; safe to repeat."""
    logger = logging.getLogger("megatron_rl")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
