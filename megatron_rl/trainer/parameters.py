"""Find this rank's parameters by `Weight.megatron`, and load them from Hugging Face files."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Weight
from megatron_rl.models.safetensors_directory import SafetensorsDirectory

_log = logging.getLogger(__name__)


def by_weight(
    architecture: Architecture, modules: Sequence[torch.nn.Module], experts: range, use_te: bool
) -> dict[str, torch.nn.Parameter]:
    """Return this rank's parameters by `Weight.megatron`, in the order of the forward pass.

    Args:
        architecture: of the model.
        modules: all chunks of this rank, each with consecutive layers.
        experts: global numbers of the routed experts on this rank.
        use_te: the modules are of the Transformer Engine spec.

    Raises:
        RuntimeError: a parameter that the architecture maps to no Hugging Face tensor.
    """
    chunks = []
    for module in modules:
        first_layer = next((layer.layer_number - 1 for layer in module.decoder.layers), 0)
        chunks.append((first_layer, dict(module.named_parameters())))
    out: dict[str, torch.nn.Parameter] = {}
    for weight in architecture.weights():
        if weight.expert is not None and weight.expert not in experts:
            continue
        for first_layer, named in chunks:
            name = weight.parameter(use_te, first_layer, experts.start)
            if name in named:
                out[weight.megatron] = named.pop(name)
    if left := sorted(name for _, named in chunks for name in named):
        raise RuntimeError(
            f"{type(architecture).__name__} maps no Hugging Face tensor to {', '.join(left)}: add"
            " them to its weights()"
        )
    return out


def load(
    architecture: Architecture,
    parameters: dict[str, torch.nn.Parameter],
    split_rank: Callable[[Weight], tuple[int, int]],
    directory: str | Path,
) -> None:
    """Copy this rank's shards from a Hugging Face directory, one parameter at a time.

    `split_rank` returns (rank, size) of the group that shards a weight.

    Raises:
        CheckpointError: as from `SafetensorsDirectory` and its `check`.
        ValueError: a parameter of another shape than the architecture's.
    """
    source = SafetensorsDirectory(directory)
    leftovers = source.check(architecture)
    if leftovers and (not dist.is_initialized() or dist.get_rank() == 0):
        _log.warning(
            f"{directory} has {len(leftovers)} tensors that the model does not have, left by the"
            f" tool that wrote it ({', '.join(sorted(leftovers)[:3])}): they are ignored"
        )
    own = [w for w in architecture.weights() if w.megatron in parameters]
    with torch.no_grad():
        # In file order: ranks of a node read the same file at about the same time.
        for weight in sorted(own, key=lambda w: max(source.file_of[name] for name in w.hf)):
            param = parameters[weight.megatron]
            tensors = [source.read(name) for name in weight.hf]
            if weight.index is not None:
                tensors = [tensor[weight.index] for tensor in tensors]
            shard = weight.split.shard(weight.pack.to_megatron(tensors), *split_rank(weight))
            if shard.shape != param.shape:
                raise ValueError(
                    f"{weight.megatron} has shape {tuple(param.shape)} on this rank, and"
                    f" {' + '.join(weight.hf)} in {directory} gives {tuple(shard.shape)}"
                )
            param.copy_(shard)
