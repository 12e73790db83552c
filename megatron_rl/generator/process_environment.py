"""Process environment of a generator; to be set before vLLM is imported."""

import os
import re
from importlib import resources
from pathlib import Path

import yaml

from megatron_rl.compat import quiet, vllm_fork
from megatron_rl.config import RunConfig
from megatron_rl.config.sections import Roles
from megatron_rl.generator import engine_errors, engine_folder
from megatron_rl.generator.vllm_plugin import ENGINE_OWNER, register

# With torchrun's variables, vLLM's workers would look for torchrun's store instead of making their
# own process group. The error file is read when the rank has failed.
TORCHRUN_VARIABLES = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_(?!ERROR_FILE).*)"
)
_FILE = resources.files(__package__) / "environment.yaml"
ENVIRONMENT: dict[str, dict[str, str]] = yaml.safe_load(_FILE.read_text())
"""Variables by the kind of engine that they are for."""


def prepare_environment(config: RunConfig, model_dir: str) -> None:
    """Choose the engine's GPUs, and set the variables that vLLM reads; those of the user stay.

    The GPUs are counted by NVML: a process that has called CUDA can neither be forked nor change
    its GPUs. ValueError: the node lacks them, or the user's start method breaks them.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # otherwise `is_available` calls CUDA
    import torch

    if devices := _engine_devices(config.roles):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    on_gpu = torch.cuda.is_available()
    forks = not on_gpu and torch.get_num_threads() == 1
    method = os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork" if forks else "spawn")
    if on_gpu and method != "spawn":
        raise ValueError(
            f"VLLM_WORKER_MULTIPROC_METHOD is {method!r}: on GPUs vLLM's processes start by"
            " 'spawn', since a forked process cannot use CUDA once its parent has; unset it"
        )
    if forks and method == "fork":
        vllm_fork.install(register)
    for name in [n for n in os.environ if TORCHRUN_VARIABLES.fullmatch(n)]:
        del os.environ[name]
    os.environ[ENGINE_OWNER] = str(os.getpid())
    engine_errors.open_file()
    engine_folder.make()
    kinds = ["everywhere", "gpu" if on_gpu else "cpu"]
    kinds += ["local_model"] * Path(model_dir).is_dir()
    if not on_gpu and config.roles.generator_tensor_parallel == 1:
        kinds.append("cpu_one_rank")
    defaults = {"VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.timeouts.startup_seconds))}
    for kind in kinds:
        defaults |= ENVIRONMENT[kind]
    quiet.ignore_in_processes("ignore::FutureWarning")
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _engine_devices(roles: Roles) -> list[str]:
    """Return the devices of the engine whose first rank this is, of those of its node, if any.

    torchrun gives rank i of a node device i; with `roles.one_gpu`, all ranks share the first. An
    engine that SLURM started takes its own part of the devices, unless SLURM shows it no others.
    """
    import torch

    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None and listed.startswith("MIG-"):
        visible = listed.split(",")  # NVML does not count them, and CUDA counts the first alone
    else:
        count = torch.cuda.device_count()
        # CUDA ends the list at the first entry that does not exist.
        visible = [*map(str, range(count))] if listed is None else listed.split(",")[:count]
    width, task = roles.generator_tensor_parallel, int(os.environ.get("SLURM_LOCALID", "0"))
    by_slurm = task * width if len(visible) != width else 0
    local_rank = int(os.environ.get("LOCAL_RANK", by_slurm))
    first = 0 if roles.one_gpu else local_rank
    end = first + width
    if visible and end > len(visible):
        raise ValueError(
            f"local rank {local_rank} with roles.generator_tensor_parallel = {width} needs {end}"
            f" GPUs on its node, and {len(visible)} are visible ({','.join(visible)}): choose roles"
            " that keep each engine within a node, and make all of its GPUs visible to torchrun"
            " (CUDA_VISIBLE_DEVICES)"
        )
    return visible[first:end]
