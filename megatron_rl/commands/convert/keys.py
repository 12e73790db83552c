"""Names of a model's parameters in a Megatron distributed checkpoint.

Rules of megatron-core 0.19 (and of its predecessors since 0.8):

- If all layers are alike, they share one tensor per parameter, [layers, ...], whose name has no
  layer number. If `moe_layer_freq` is a list, each layer has its own names.
- Experts share one tensor, [experts, ...], inside that of the layers.
- Both specs use Transformer Engine's names of the norms, which are fused into the linear layer that
  follows. One differs: the norm before a mixture of experts is `mlp.linear_fc1.layer_norm_weight`
  in the local spec and `pre_mlp_layernorm.weight` in Transformer Engine's.
- Every linear layer has an `_extra_state` object (FP8 scales; None without). Transformer Engine's
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
class StoredParameter:
    """Position of one parameter in the tensors of a checkpoint.

    Example: expert 3 of layer 7, in a model of 32 identical layers with 8 experts:
    `StoredParameter(("decoder.layers.mlp.experts.experts.linear_fc2.weight",), (32, 8), (7, 3))`.
    """

    keys: tuple[str, ...]
    """Names of the tensor: one, or the local spec's and Transformer Engine's."""
    stack: tuple[int, ...]
    """Sizes of the dimensions before those of the parameter: layers, experts."""
    index: tuple[int, ...]
    """Index in those dimensions."""


def layers_are_stacked(architecture: Architecture) -> bool:
    """Return True if Megatron stores this model's layers in one tensor per parameter."""
    frequency = architecture.config_fields().get("moe_layer_freq", 1)
    return isinstance(frequency, int) and frequency <= 1


def stored_parameter(architecture: Architecture, weight: Weight, stacked: bool) -> StoredParameter:
    """Return the position of a parameter, with `stacked` layers or with layers by name."""
    name = weight.megatron
    stack: tuple[int, ...] = ()
    index: tuple[int, ...] = ()
    layer = _LAYER.match(name)
    if layer is not None and stacked:
        stack, index = (architecture.layers,), (int(layer[1]),)
        name = _LAYER.sub("decoder.layers.", name)
    if weight.expert is not None:
        stack, index = (*stack, architecture.experts), (*index, weight.expert)
        name = _EXPERT.sub(".experts.", name)
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    name = name.replace(".pre_dense_layernorm.", ".mlp.linear_fc1.layer_norm_")
    if name.endswith(_TE_MOE_NORM):
        local = name.replace(_TE_MOE_NORM, _LOCAL_MOE_NORM)
        return StoredParameter((local, name), stack, index)
    return StoredParameter((name,), stack, index)


def extra_states(parameter: StoredParameter) -> list[str]:
    """Return the names of the `_extra_state` objects that belong to a parameter, in both specs.

    Example: `decoder.layers.0.mlp.linear_fc2._extra_state/shard_0_1`.
    """
    index, stack = parameter.index or (0,), parameter.stack or (1,)
    shard = f"/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, stack))}"
    names = []
    for key in parameter.keys:
        module, _, last = key.rpartition(".")
        if last != "weight" or module in ("embedding.word_embeddings", "output_layer"):
            continue
        if not module.endswith("router"):
            names.append(f"{module}._extra_state{shard}")
        if module.endswith("self_attention.linear_proj"):
            core = module.removesuffix("linear_proj") + "core_attention"
            names.append(f"{core}._extra_state{shard}")
    return names
