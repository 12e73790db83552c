"""Process environment and signals of a generator; to be set before vLLM is imported."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from megatron_rl.compat import quiet
from megatron_rl.config import RunConfig
from megatron_rl.generator.vllm_plugin import ENGINE_OWNER

# With torchrun's variables, vLLM's workers would look for torchrun's store instead of making their
# own process group.
TORCHRUN_VARIABLES = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*)"
)


def ignore_signals() -> None:
    """Ignore Ctrl-C and torchrun's SIGTERM, which reach every rank: a generator ends by Stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def prepare_environment(config: RunConfig, model_dir: str) -> None:
    """Set the environment variables that vLLM reads; those that the user has set stay."""
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        _choose_gpus(config.roles.generator_tensor_parallel)
    for name in [n for n in os.environ if TORCHRUN_VARIABLES.fullmatch(n)]:
        del os.environ[name]
    os.environ[ENGINE_OWNER] = str(os.getpid())

    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # On CPU vLLM warns about a dozen things that are intended (eager, no Triton, no GPU).
        "VLLM_LOGGING_LEVEL": "WARNING" if on_gpu else "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.timeouts.startup_seconds)),
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(model_dir).is_dir():
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if not on_gpu:
        defaults |= {
            # Eager runs need no compiler, and the first log-prob would start one (seconds).
            "TORCHDYNAMO_DISABLE": "1",
            # The cores are shared with the trainers: a bound worker waits for its core while the
            # other one is free, and more threads than one lose to oversubscription.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        if config.roles.generator_tensor_parallel == 1:
            # The worker runs in the engine's process: another one would double the start-up time
            # and poll for work (0.3 cores when idle, a third more per token).
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    quiet.ignore_in_processes("ignore::FutureWarning")
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _choose_gpus(tensor_parallel: int) -> None:
    # Each engine takes the GPUs of its own ranks: torchrun gives rank i of a node GPU i.
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None:
        return
    first = int(local_rank)
    end = first + tensor_parallel
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(end)] if visible is None else visible.split(",")
    if end > len(devices):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is {visible!r}: local rank {first} with"
            f" roles.generator_tensor_parallel = {tensor_parallel} needs {end} devices; make all of"
            " the node's GPUs visible to torchrun"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first:end])
