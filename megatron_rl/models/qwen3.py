"""Qwen3: Llama's shape, and an RMS norm of each head's query and key before the rotation."""

from collections.abc import Mapping
from typing import Any, override

from megatron_rl.models.llama import Llama
from megatron_rl.models.mapping import Weight


class Qwen3(Llama):
    """`model_type` "qwen3"."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        super().__init__(hf)
        self.require("use_sliding_window", False)

    @override
    def config_fields(self) -> dict[str, Any]:
        return {**super().config_fields(), "qk_layernorm": True}

    @override
    def layer_options(self, layer: int) -> dict[str, Any]:
        return {**super().layer_options(layer), "qk_norm": True}

    @override
    def layer_weights(self, layer: int) -> list[Weight]:
        return self.head_norm_weights(layer) + super().layer_weights(layer)


class Qwen3Moe(Qwen3):
    """`model_type` "qwen3_moe": Qwen3's attention, routed experts in place of most MLPs.

    Facts on which the code of Qwen and transformers agrees, with Megatron's settings:

    - Router: softmax over all experts, the top k of it, divided by their sum if `norm_topk_prob`.
      With the division it equals the softmax of the k logits (Megatron's default); without, it is
      the softmax before the selection (`moe_router_pre_softmax`).
    - No shared expert. A layer is dense if it is in `mlp_only_layers`, or if its number (from 1) is
      no multiple of `decoder_sparse_step`.
    - The checkpoint has separate tensors for every expert.
    """

    def __init__(self, hf: Mapping[str, Any]) -> None:
        super().__init__(hf)
        # transformers writes either name.
        experts = int(hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"])
        dense, step = hf.get("mlp_only_layers") or [], int(hf.get("decoder_sparse_step", 1))
        self.moe_layers = {
            i for i in range(self.layers) if experts and i not in dense and (i + 1) % step == 0
        }
        self.experts = experts if self.moe_layers else 0
        self.expert_feed_forward = int(hf["moe_intermediate_size"])
        self.normalized = bool(hf.get("norm_topk_prob", False))
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"config.json has num_experts_per_tok = {self.experts_per_token} of"
                f" {self.experts} experts: it must not exceed their number"
            )
        if self.experts_per_token == 1 and self.normalized:
            raise ValueError(
                "config.json has num_experts_per_tok = 1 with norm_topk_prob = true: the router's"
                " probability is then 1 for every token and it learns nothing; set norm_topk_prob"
                " to false"
            )

    @override
    def config_fields(self) -> dict[str, Any]:
        fields = super().config_fields()
        if self.moe_layers:
            fields["moe_router_score_function"] = "softmax"
            fields["moe_router_pre_softmax"] = not self.normalized
        return fields

    @override
    def layer_weights(self, layer: int) -> list[Weight]:
        if layer not in self.moe_layers:
            return super().layer_weights(layer)
        m, h = self.names(layer)
        router = (self.experts, self.hidden)
        out = [
            *self.head_norm_weights(layer),
            self.mlp_norm_weight(layer, dense=False),
            Weight(m + "mlp.router.weight", (h + "mlp.gate.weight",), router),
        ]
        for e in range(self.experts):
            local, size = f"{m}mlp.experts.local_experts.{e}", self.expert_feed_forward
            out += self.gated_weights(local, f"{h}mlp.experts.{e}", size, expert=e)
        return out
