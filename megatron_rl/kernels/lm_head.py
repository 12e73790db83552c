"""LM head with fp32 results: operands as they are stored, products summed in fp32.

Products of bf16 numbers are exact in fp32, so this equals upcasting both operands up to the order
of the sums; no fp32 copy of the weight is kept, so none can go stale. `heads` has the ways to make
the products, `fused` the losses that never hold all logits.

Shape legend: T rows, H hidden, V vocabulary of this rank.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.kernels import ops
from megatron_rl.kernels.heads import LogitGrads, Precision


def fp32_linear(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    precision: Precision = "fp32",
    logit_grads: LogitGrads = "auto",
) -> Tensor:
    """Logits [T, V] in fp32 of hidden states [T, H] and a head [V, H] of any one dtype.

    Args:
        hidden_TH: bf16 or fp32.
        weight_VH: of the same type.
        precision: see `heads.Precision`.
        logit_grads: see `heads.LogitGrads`.
    """
    logits_TV: Tensor = ops.fp32_linear(hidden_TH, weight_VH, precision, logit_grads)
    return logits_TV
