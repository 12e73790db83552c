"""Find this rank's parameters by `Weight.megatron`, and load them from Hugging Face files."""

import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Weight
from megatron_rl.trainer import hf_checkpoint

_log = logging.getLogger(__name__)


def by_weight(
    architecture: Architecture, modules: Sequence[torch.nn.Module], experts: range, use_te: bool
) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of all model chunks, in the order of the forward pass.

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

    Args:
        architecture: the directory must hold exactly its trained tensors.
        parameters: of this rank, by `Weight.megatron`.
        split_rank: (rank, size) of the group that shards a weight.
        directory: a Hugging Face model.

    Raises:
        ValueError: names or shapes that differ from the architecture's, or a second copy of tied
            embeddings that is another matrix.
    """
    weights = architecture.weights()
    expected = {name for w in weights for name in w.hf}
    with hf_checkpoint.TensorReader(directory) as reader, torch.no_grad():
        names = reader.names() - set(architecture.passthrough(reader.names()))
        leftovers = architecture.leftovers(names - expected)
        names -= set(leftovers)
        if names != expected:
            missing, extra = sorted(expected - names), sorted(names - expected)
            raise ValueError(
                f"{directory} does not hold the tensors of its config.json: missing"
                f" {missing[:5]}, unknown {extra[:5]}"
            )
        own = [w for w in weights if w.megatron in parameters]
        _ignore(leftovers, reader, own)
        # In file order, so that each file is mapped once.
        for weight in sorted(own, key=lambda w: max(map(reader.file, w.hf))):
            param = parameters[weight.megatron]
            tensors = [reader.get(name, weight.index) for name in weight.hf]
            shapes = [tuple(t.shape) for t in tensors]
            if shapes != weight.hf_shapes():
                raise ValueError(
                    f"{' + '.join(weight.hf)} in {directory} have shapes {shapes}: its config.json"
                    f" makes them {weight.hf_shapes()}"
                )
            shard = weight.split.shard(weight.pack.to_megatron(tensors), *split_rank(weight))
            if shard.shape != param.shape:
                raise ValueError(
                    f"{weight.megatron} has shape {tuple(param.shape)} on this rank, and"
                    f" {' + '.join(weight.hf)} in {directory} gives {tuple(shard.shape)}"
                )
            param.copy_(shard)


def _ignore(leftovers: list[str], reader: hf_checkpoint.TensorReader, own: list[Weight]) -> None:
    """Log tensors that are not read, once; the head of tied embeddings must be equal to them."""
    tied = {w.hf[0] for w in own if w.hf[0].endswith("embed_tokens.weight")}
    heads = [name for name in leftovers if name.endswith("lm_head.weight")]
    for name, embedding in itertools.product(heads, tied):
        if not reader.get(name).equal(reader.get(embedding)):
            raise ValueError(
                f"{reader.directory} has another {name} than {embedding}, and its config.json ties"
                f" them: set tie_word_embeddings to false there to train both, or remove {name}"
            )
    if leftovers and (not dist.is_initialized() or dist.get_rank() == 0):
        _log.warning(
            f"{reader.directory} has {len(leftovers)} tensors that the model does not have, left by"
            f" the tool that wrote it ({', '.join(sorted(leftovers)[:3])}): they are ignored"
        )
