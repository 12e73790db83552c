"""Build Megatron's objects from the run's configuration: config, module, gradients, optimizer."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_rl.config import RunConfig
from megatron_rl.kernels import transformer_engine as engine
from megatron_rl.models.attention import Rotary, final_norm
from megatron_rl.models.base import Architecture
from megatron_rl.models.divisibility import first_stage_layers
from megatron_rl.models.mapping import padded_vocabulary
from megatron_rl.trainer import world


def transformer_engine() -> bool:
    """Return True if layers are Transformer Engine's: CUDA is available, and it is installed.

    Raises:
        RuntimeError: it is installed, and it or Megatron's layers of it cannot be used.
    """
    if engine.general_gemm() is None:
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise RuntimeError(
            "Transformer Engine loads, but this Megatron-Core does not find in it what its layers"
            " need: install a release of both that constraints.txt names, or remove Transformer"
            " Engine to train with Megatron's local layers"
        )
    return True


def finalize_gradients(
    model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any
) -> None:
    """Reduce the gradients and divide by nothing: the loss weights hold all divisors."""
    finalize_model_grads(model, None, **kwargs)


def _recompute(kind: str, use_te: bool) -> dict[str, Any]:
    if kind == "none":
        return {}
    if kind == "full":
        units = {"recompute_method": "uniform", "recompute_num_layers": 1}
        return {"recompute_granularity": "full", **units}
    # Discarding outputs ("layernorm", "moe_act") needs Transformer Engine.
    modules = ["mlp", "shared_experts", *(["layernorm", "moe_act"] if use_te else [])]
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def transformer_config(
    run: RunConfig, architecture: Architecture, use_te: bool
) -> TransformerConfig:
    """Return Megatron's configuration of this model, layout and machine."""
    p, cuda = run.parallel, torch.cuda.is_available()
    interleaved = p.virtual_pipeline > 1
    first_layers = first_stage_layers(architecture.layers, p.pipeline, p.virtual_pipeline)
    dtype = torch.bfloat16 if run.precision.params == "bf16" else torch.float32
    return TransformerConfig(
        **architecture.config_fields(),
        **_recompute(p.recompute, use_te),
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=p.tensor,
        pipeline_model_parallel_size=p.pipeline,
        num_layers_in_first_pipeline_stage=first_layers,
        virtual_pipeline_model_parallel_size=p.virtual_pipeline if interleaved else None,
        # Batched, messages between two stages in both directions would be mixed up.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        context_parallel_size=p.context,
        expert_model_parallel_size=p.expert,
        expert_tensor_parallel_size=p.expert_tensor,
        sequence_parallel=p.sequence_parallel,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_gradients,
        variable_seq_lengths=p.pipeline > 1,  # micro-batches differ in shape
        # gloo sends asynchronously from a buffer that must not be freed.
        deallocate_pipeline_outputs=cuda,
        perform_initialization=False,
        attention_softmax_in_fp32=True,
        # Makes Megatron pass positions to the rotary embedding; here they are one-dimensional.
        mrope_section=[architecture.head_dim // 2],
        apply_rope_fusion=use_te,
        masked_softmax_fusion=False,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        moe_grouped_gemm=use_te,
        moe_permute_fusion=use_te,
        moe_token_dispatcher_type="alltoall",
    )


def build_module(
    run: RunConfig,
    architecture: Architecture,
    config: TransformerConfig,
    use_te: bool,
    chunk: int = 0,
) -> GPTModel:
    """Return a chunk of this pipeline stage, with uninitialized parameters."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunks = run.parallel.virtual_pipeline
    virtual = chunk if chunks > 1 else None
    first = get_transformer_layer_offset(config, virtual, stage)
    end = first + get_num_layers_to_build(config, virtual, stage)
    own = architecture.layer_specs(use_te)[first:end]
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=own, layer_norm=final_norm(use_te)),
        padded_vocabulary(architecture.vocabulary, run.parallel.tensor),
        architecture.positions,
        pre_process=stage == 0 and chunk == 0,
        post_process=stage == run.parallel.pipeline - 1 and chunk == chunks - 1,
        vp_stage=virtual,
        position_embedding_type="mrope",
        share_embeddings_and_output_weights=architecture.tied,
    )
    frequencies = architecture.inverse_frequencies().to(world.device())
    model.rotary_pos_emb = Rotary(frequencies, architecture.interleaved_rope)
    for layer in model.modules():
        # As `gradient_accumulation_fusion` does; with it, Megatron's head would need apex.
        if hasattr(layer, "fuse_wgrad_accumulation"):
            layer.fuse_wgrad_accumulation = True
    return model


def shards_optimizer(run: RunConfig) -> bool:
    """Return True if the distributed optimizer is enabled and there is more than one replica."""
    return run.parallel.distributed_optimizer and run.data_parallel * run.parallel.context > 1


def wrap(run: RunConfig, config: TransformerConfig, module: GPTModel) -> DistributedDataParallel:
    """Return the module with gradient buffers, on its device and in its number format."""
    inner: torch.nn.Module = module.to(world.device())
    if config.bf16:
        inner = Float16Module(config, inner)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=shards_optimizer(run),
        overlap_grad_reduce=run.parallel.overlap_grad_reduce,
        overlap_param_gather=run.parallel.overlap_param_gather and shards_optimizer(run),
        align_param_gather=True,  # `Policy.apply` starts all of them
    )
    return DistributedDataParallel(config, ddp, inner)


def make_optimizer(
    run: RunConfig, config: TransformerConfig, chunks: list[DistributedDataParallel]
) -> Any:
    """Return Megatron's AdamW over the wrapped modules."""
    o = run.optimizer
    options = OptimizerConfig(
        optimizer="adam",
        lr=o.learning_rate,
        weight_decay=o.weight_decay,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        adam_eps=o.eps,
        clip_grad=o.clip_grad_norm,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=shards_optimizer(run),
    )
    optimizer = get_megatron_optimizer(options, chunks)
    config.grad_scale_func = optimizer.scale_loss
    if not torch.cuda.is_available():
        for group in optimizer.param_groups:
            group["fused"] = True  # one call for all parameters; not Megatron's default
    return optimizer
