"""Qwen3 mixture of experts: Qwen3's attention, and routed experts in place of most MLPs.

Facts that the files of Qwen and transformers agree on, and how Megatron is told:

- Router: softmax over all experts, the top k of it, divided by their sum when `norm_topk_prob`.
  Divided so it is the softmax of the k logits (Megatron's default); not divided, it is the softmax
  before the choice (`moe_router_pre_softmax`).
- No shared expert. A layer is dense when it is in `mlp_only_layers`, or when its number (from 1)
  is no multiple of `decoder_sparse_step`.
- The checkpoint has tensors of their own for every expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_rl.models.mapping import Weight
from megatron_rl.models.qwen3 import Qwen3

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


class Qwen3Moe(Qwen3):
    """`model_type` "qwen3_moe"."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        super().__init__(hf)
        # transformers writes either name.
        self.routed = int(hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"])
        dense, step = hf.get("mlp_only_layers") or [], int(hf.get("decoder_sparse_step", 1))
        self.moe_layers = {
            i for i in range(self.layers) if self.routed and i not in dense and (i + 1) % step == 0
        }
        self.expert_feed_forward = int(hf["moe_intermediate_size"])
        self.normalised = bool(hf.get("norm_topk_prob", False))
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"config.json has num_experts_per_tok = {self.experts_per_token} of"
                f" {self.experts} experts: a token takes as many as there are at most"
            )
        if self.experts_per_token == 1 and self.normalised:
            raise ValueError(
                "config.json has num_experts_per_tok = 1 with norm_topk_prob = true: the router's"
                " probability is then 1 for every token and it learns nothing; set norm_topk_prob"
                " to false"
            )

    @property
    def experts(self) -> int:
        return self.routed if self.moe_layers else 0

    def config_fields(self) -> dict[str, Any]:
        fields = super().config_fields()
        if self.moe_layers:
            fields |= {
                "num_moe_experts": self.experts,
                "moe_layer_freq": [int(i in self.moe_layers) for i in range(self.layers)],
                "moe_ffn_hidden_size": self.expert_feed_forward,
                "moe_router_topk": self.experts_per_token,
                "moe_router_score_function": "softmax",
                "moe_router_pre_softmax": not self.normalised,
                "moe_router_dtype": "fp32",
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": 0.0,
            }
        return fields

    def layer_specs(self, use_te: bool) -> list[ModuleSpec]:
        from megatron_rl.models import specs

        return [
            specs.layer(use_te, experts=self.experts if i in self.moe_layers else 0, qk_norm=True)
            for i in range(self.layers)
        ]

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
