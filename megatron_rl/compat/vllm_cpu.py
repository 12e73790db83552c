"""Mends of vLLM's CPU build: weights that are wrong after any reload, without an error.

Both are of vLLM 0.32.0, and inert on other versions and where the platform is not CPU;
`tests/rollout/test_compat_vllm_cpu.py` tells for each when it is no longer needed.

- Experts. `UnquantizedFusedMoEMethod._setup_kernel` skips, on a weight update (`moe_kernel` exists
  already), `fused_experts.process_weights_after_loading(layer)`, which packs `w13` and `w2` into
  the layout of the CPU kernels. The kernel then reads plain weights as packed ones.
- Tied LM head. The layerwise reload processes a layer when a weight of its own was loaded; a head
  that shares the embedding's weight has none, and keeps the packed copy of the old one.
"""

from __future__ import annotations

import functools
import os
from typing import Any

AFFECTED = ("0.32.0", "0.32.99")
"""First and last affected vLLM version; raise the last one as long as the test still says so."""
DISABLE = "MEGATRON_RL_NO_CPU_MOE_MEND"
"""Environment variable that leaves vLLM as it is (for the test that shows the fault)."""


def needed() -> bool:
    """Whether the installed vLLM has the fault and runs on CPU."""
    from packaging.version import Version
    from vllm import __version__
    from vllm.platforms import current_platform

    first, last = AFFECTED
    release = Version(Version(__version__).base_version)
    return bool(current_platform.is_cpu()) and Version(first) <= release <= Version(last)


def pack_tied_head_again(model: Any) -> None:
    """After an update: pack the LM head of `model` if it shares the embedding's weight."""
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or not needed():
        return
    if getattr(head, "weight", None) is embedding.weight:
        head.quant_method.process_weights_after_loading(head)


def mend_moe_reload() -> bool:
    """Pack the experts' weights again on every weight update; returns whether it is mended."""
    if os.environ.get(DISABLE) or not needed():
        return False
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    original = UnquantizedFusedMoEMethod._setup_kernel
    if getattr(original, "_megatron_rl_mend", False):
        return True

    @functools.wraps(original)
    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_weight_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_weight_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setup_kernel._megatron_rl_mend = True  # type: ignore[attr-defined]
    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel
    return True
