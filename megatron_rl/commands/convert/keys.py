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

from dataclasses import dataclass

from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Weight, transformer_engine_name

_LOCAL_MOE_NORM, _TE_MOE_NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """Position of one parameter in the tensors of a checkpoint.

    Example: expert 3 of layer 7, in a model of 32 identical layers with 8 experts:
    `StoredParameter(("decoder.layers.mlp.experts.experts.linear_fc2.weight",), (32, 8), (7, 3))`.
    """

    keys: tuple[str, ...]  # names of the tensor: one, or the local spec's and Transformer Engine's
    stack: tuple[int, ...]  # sizes of the dimensions before those of the parameter: layers, experts
    index: tuple[int, ...]  # index in those dimensions


def stored_parameter(architecture: Architecture, weight: Weight, stacked: bool) -> StoredParameter:
    """Return the position of a parameter, with `stacked` layers or with layers by name."""
    name, stack, index = weight.megatron, list[int](), list[int]()
    if weight.layer is not None and stacked:
        stack, index = [architecture.layers], [weight.layer]
        name = name.replace(f".layers.{weight.layer}.", ".layers.")
    if weight.expert is not None:
        stack, index = [*stack, architecture.experts], [*index, weight.expert]
        name = name.replace(f".local_experts.{weight.expert}.", ".experts.")
    name = transformer_engine_name(name)
    keys = dict.fromkeys((name.replace(_TE_MOE_NORM, _LOCAL_MOE_NORM), name))
    return StoredParameter(tuple(keys), tuple(stack), tuple(index))


def extra_states(parameter: StoredParameter) -> list[str]:
    """Return the names of the `_extra_state` objects that belong to a parameter, in both specs.

    Example: `decoder.layers.0.mlp.linear_fc2._extra_state/shard_0_1`.
    """
    index, stack = parameter.index or (0,), parameter.stack or (1,)
    shard = f"/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, stack))}"
    names = []
    for key in parameter.keys:
        module, _, last = key.rpartition(".")
        if last == "weight" and not module.endswith(("word_embeddings", "output_layer", "router")):
            names.append(f"{module}._extra_state{shard}")
        if module.endswith("self_attention.linear_proj") and last == "weight":
            core = module.removesuffix("linear_proj") + "core_attention"
            names.append(f"{core}._extra_state{shard}")
    return names
