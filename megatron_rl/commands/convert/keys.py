"""What a parameter is called in a Megatron distributed checkpoint, and where it is in its tensor.

Rules of megatron-core 0.19 (and of its predecessors since 0.8):

- Layers that are all alike share one tensor per parameter, [layers, ...], named without the layer's
  number. Where `moe_layer_freq` is a list, each layer has names of its own.
- Experts share one tensor, [experts, ...], inside of that of the layers.
- Norms have the name that Transformer Engine gives them, fused into the linear layer after them,
  in both specs. One differs: the norm before a mixture of experts, which the local spec calls
  `mlp.linear_fc1.layer_norm_weight` and Transformer Engine's `pre_mlp_layernorm.weight`.
- Every linear layer has an `_extra_state` object (fp8 scales; None without). Transformer Engine's
  norms and attention may have one as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Weight

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.\d+\.")
_LOCAL_MOE_NORM, _TE_MOE_NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter inside of a checkpoint's tensors.

    Example: expert 3 of layer 7 of a model of 32 like layers with 8 experts:
    `Place(("decoder.layers.mlp.experts.experts.linear_fc2.weight",), (32, 8), (7, 3))`.
    """

    keys: tuple[str, ...]
    """Names of the same tensor: one, or the local spec's and Transformer Engine's."""
    lead: tuple[int, ...]
    """Extents of the dimensions before the parameter's own: layers, experts."""
    at: tuple[int, ...]
    """Position in those."""


def stacked_layers(architecture: Architecture) -> bool:
    """Whether Megatron stores this model's layers in one tensor per parameter."""
    frequency = architecture.config_fields().get("moe_layer_freq", 1)
    return isinstance(frequency, int) and frequency <= 1


def place(architecture: Architecture, weight: Weight, stacked: bool) -> Place:
    """Where a parameter is, with layers in one tensor (`stacked`) or in tensors of their own."""
    name = weight.megatron
    lead: tuple[int, ...] = ()
    at: tuple[int, ...] = ()
    layer = _LAYER.match(name)
    if layer is not None and stacked:
        lead, at = (architecture.layers,), (int(layer[1]),)
        name = _LAYER.sub("decoder.layers.", name)
    if weight.expert is not None:
        lead, at = (*lead, architecture.experts), (*at, weight.expert)
        name = _EXPERT.sub(".experts.", name)
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    name = name.replace(".pre_dense_layernorm.", ".mlp.linear_fc1.layer_norm_")
    if name.endswith(_TE_MOE_NORM):
        return Place((name.replace(_TE_MOE_NORM, _LOCAL_MOE_NORM), name), lead, at)
    return Place((name,), lead, at)


def extra_states(place: Place) -> list[str]:
    """Names of the `_extra_state` objects that come with a parameter, of both specs.

    Example: `decoder.layers.0.mlp.linear_fc2._extra_state/shard_0_1`.
    """
    at, of = place.at or (0,), place.lead or (1,)
    shard = f"/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, of))}"
    found = []
    for key in place.keys:
        module, _, last = key.rpartition(".")
        if last != "weight" or module in ("embedding.word_embeddings", "output_layer"):
            continue
        if not module.endswith("router"):
            found.append(f"{module}._extra_state{shard}")
        if module.endswith("self_attention.linear_proj"):
            core = module.removesuffix("linear_proj") + "core_attention"
            found.append(f"{core}._extra_state{shard}")
    return found
