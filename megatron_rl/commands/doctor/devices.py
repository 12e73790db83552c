"""GPUs, Transformer Engine and the compiled kernels, from the trainer's side."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from megatron_rl.commands.doctor.child import ProcessFailed, output_of
from megatron_rl.commands.doctor.result import Result, fail, note, ok


def has_cuda() -> bool:
    """Whether torch finds a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


def driver_is_there() -> bool:
    """Whether the kernel has an NVIDIA driver loaded, whatever torch thinks of it."""
    return Path("/proc/driver/nvidia/version").exists()


def check_gpus() -> Result:
    """Devices by name, or why there are none."""
    import torch

    check = "GPUs"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        major, minor = torch.cuda.get_device_capability(0)
        return ok(check, f"{len(names)} x {names[0]} (compute capability {major}.{minor})")
    if driver_is_there():
        return fail(
            check,
            f"an NVIDIA driver is loaded, and torch {torch.__version__} finds no device",
            "install a torch whose CUDA the driver supports, and show the devices to this process"
            " (docker run --gpus all; CUDA_VISIBLE_DEVICES)",
        )
    return note(check, "none: everything runs on CPU (gloo, vLLM's CPU build), at laptop size")


def check_transformer_engine(*, cuda: bool) -> Result:
    """Usable, or why not: an unusable one breaks `import megatron.core`."""
    check = "Transformer Engine"
    if importlib.util.find_spec("transformer_engine") is None:
        if not cuda:
            return note(check, "not installed, and not usable without a GPU: torch's layers serve")
        return note(check, "not installed: Megatron's local layers serve; FP8 needs it")
    code = "import transformer_engine.pytorch as te; te.Linear; print(te.__file__)"
    try:
        where = output_of([sys.executable, "-c", code]).strip()
    except ProcessFailed as e:
        remedy = (
            "install the build that fits torch and CUDA here, or remove it"
            if cuda
            else "pip uninstall transformer-engine: it needs a GPU"
        )
        return fail(
            check,
            f"installed and not usable: {e}",
            f"{remedy}; Megatron-Core imports it at its start",
        )
    return ok(check, where)


def check_kernels(*, cuda: bool) -> Result:
    """The compiled library of the fused losses, found or still to be built."""
    from megatron_rl.kernels import build

    check = "compiled kernels"
    names = [build.library_name(True)] + ([] if cuda else [build.library_name(False)])
    folders = (Path(build.__file__).parent, build.cache_directory())
    for path in (folder / name for folder in folders for name in names):
        if path.is_file():
            return ok(check, str(path))
    command = f"{sys.executable} -m megatron_rl.kernels.build"
    if cuda and build.find_nvcc() is None:
        return fail(
            check,
            f"none for these sources in {folders[0]} or {folders[1]}, and no nvcc to build them",
            "install the CUDA toolkit (nvcc on PATH or in CUDA_HOME), then: " + command,
        )
    try:
        build._compiler()
    except build.BuildError as e:
        return fail(
            check, f"none, and {e}", "install g++; until then the slower torch reference serves"
        )
    return note(check, f"none yet: built at the first use (now: {command})")
