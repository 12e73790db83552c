"""The Megatron world: torch.distributed over the trainer ranks, and Megatron's groups in it.

Torchrun may have started more ranks (generators). The trainers are the first ones; only they are
in this world's default process group.
"""

import gc
import math
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from megatron_rl import compat
from megatron_rl.config import ConfigError, RunConfig

CONTEXTS_GIB = 2.0
"""Memory for the CUDA contexts of trainer and generator, which neither's allocator counts."""
_control: list[dist.ProcessGroup] = []
_rows: list[tuple[list[int], dist.ProcessGroup | None]] = []


def device() -> torch.device:
    """Return the device of this rank's parameters."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def control_group() -> dist.ProcessGroup:
    """Return a gloo group of all trainer ranks; its time-out outlasts the wait for a batch."""
    return _control[0]


def background_group() -> dist.ProcessGroup:
    """Return a group like that of control, for the thread that writes checkpoints."""
    return _control[1]


def row_groups() -> list[tuple[list[int], dist.ProcessGroup | None]]:
    """Return the ranks of each model-parallel group, which have the same rows, and its gloo group.

    They are in the order of data-parallel ranks, and of context-parallel ranks within these. There
    is no gloo group of a single rank.
    """
    return list(_rows)


def init_world(config: RunConfig, rank: int, world_size: int, store: dist.Store) -> None:
    """Join this process, rank `rank` of the trainer ranks, to the Megatron world, and seed it.

    The trainer ranks share the store; its keys get a prefix.

    Raises:
        ValueError: sizes that don't fit together.
        ConfigError: on one GPU, the generator leaves the trainer no memory.
    """
    p, t = config.parallel, config.timeouts
    compat.collect_as_usual()  # once: `_release_models` would walk through the modules, too
    cuda = torch.cuda.is_available()
    if cuda:
        local = int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count()))
        torch.cuda.set_device(local)
        if config.roles.one_gpu:
            _leave_memory_to_the_generator(config, local)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.PrefixStore("megatron", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=t.startup_seconds),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tensor,
        pipeline_model_parallel_size=p.pipeline,
        virtual_pipeline_model_parallel_size=p.virtual_pipeline if p.virtual_pipeline > 1 else None,
        context_parallel_size=p.context,
        expert_model_parallel_size=p.expert,
        expert_tensor_parallel_size=p.expert_tensor,
        distributed_timeout_minutes=math.ceil(t.startup_seconds / 60),
    )
    join_world(config)
    torch.manual_seed(config.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(config.seed)


def _leave_memory_to_the_generator(config: RunConfig, device: int) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = config.generation.gpu_memory_fraction
    share = 1 - fraction - CONTEXTS_GIB * 2**30 / total
    if share <= 0:
        raise ConfigError(
            f"generation.gpu_memory_fraction is {fraction}: of this GPU's {total / 2**30:.1f} GiB"
            f" it leaves the trainer nothing (roles.one_gpu; {CONTEXTS_GIB:g} GiB are for the CUDA"
            " contexts of both); lower it"
        )
    torch.cuda.set_per_process_memory_fraction(share, device)


def join_world(config: RunConfig) -> None:
    """Create the control groups in a world that Megatron has set up; collective."""
    t = config.timeouts
    wait = t.batch_seconds + t.evaluation_seconds + t.startup_seconds
    limit = timedelta(seconds=wait)
    _control[:] = [dist.new_group(backend="gloo", timeout=limit) for _ in range(2)]
    m = parallel_state
    own = m.get_data_parallel_rank(), m.get_context_parallel_rank()
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, own, group=control_group())
    _rows.clear()
    for place in sorted(set(places)):
        ranks = [rank for rank, other in enumerate(places) if other == place]
        several = len(ranks) > 1
        peers = dist.new_group(ranks, backend="gloo", timeout=limit) if several else None
        _rows.append((ranks, peers))


def destroy_world() -> None:
    """Leave the world and release its models; `init_world` may create another in this process."""
    _control.clear()
    _rows.clear()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()
    if dist.is_initialized():
        dist.destroy_process_group()
    _release_models()


def _release_models() -> None:
    # Reference cycles through autograd nodes are invisible to the GC and keep the model, its
    # process groups and their sockets alive. A token dispatcher keeps the probabilities of its last
    # pass, whose graph has hooks of the model; an optimizer's shards are views of parameters.
    for item in gc.get_objects():
        kind = type(item)
        if issubclass(kind, MoETokenDispatcher | MegatronOptimizer):
            vars(item).clear()
        elif issubclass(kind, torch.nn.Parameter):
            vars(item).pop("main_param", None)
