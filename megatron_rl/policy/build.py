"""From the run's configuration to Megatron's objects: config, module, gradients, optimizer."""

from __future__ import annotations

import importlib.util
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
from megatron_rl.models import specs
from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import padded_vocabulary
from megatron_rl.policy import world


def transformer_engine() -> bool:
    """Whether layers are Transformer Engine's: CUDA is there, and it is installed."""
    return torch.cuda.is_available() is True and _installed("transformer_engine")


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def check_sizes(run: RunConfig, architecture: Architecture) -> None:
    """Refuses parallel sizes that the model cannot be divided by.

    Raises:
        ValueError: names the key, its value and the model's count.
    """
    p, a = run.parallel, architecture
    for key, size, what, count in (
        ("parallel.tensor", p.tensor, "key-value heads", a.groups),
        ("parallel.tensor", p.tensor, "attention heads", a.heads),
        ("parallel.expert", p.expert, "experts", a.experts),
    ):
        if count % size:
            raise ValueError(
                f"{key} is {size}: the model has {count} {what}, which cannot be divided so;"
                " choose a size that divides them"
            )
    if a.experts and p.tensor > 1 and not p.sequence_parallel:
        raise ValueError(
            f"parallel.tensor is {p.tensor}: a mixture of experts trains with it only together"
            " with parallel.sequence_parallel = true"
        )
    _layers_by_stage(a.layers, p.pipeline)


def _layers_by_stage(layers: int, stages: int) -> dict[str, int]:
    """Megatron's field for an uneven first stage; the last one has the head as well.

    Raises:
        ValueError: layers that leave no even split for the stages after the first.
    """
    if layers % stages == 0:
        return {}
    first = -(-layers // stages)
    if layers < stages or (layers - first) % (stages - 1):
        raise ValueError(
            f"parallel.pipeline is {stages}: {layers} layers cannot be divided into a first stage"
            f" of {first} and {stages - 1} equal ones; choose another size"
        )
    return {"num_layers_in_first_pipeline_stage": first}


def _finalize_gradients(
    model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any
) -> None:
    """Reduces the gradients and divides them by nothing: the loss weights hold all divisors."""
    finalize_model_grads(model, None, **kwargs)


def transformer_config(
    run: RunConfig, architecture: Architecture, use_te: bool
) -> TransformerConfig:
    """Megatron's configuration of this model, layout and machine."""
    p, cuda = run.parallel, torch.cuda.is_available()
    dtype = torch.bfloat16 if run.precision.params == "bf16" else torch.float32
    return TransformerConfig(
        **architecture.config_fields(),
        **_layers_by_stage(architecture.layers, p.pipeline),
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=p.tensor,
        pipeline_model_parallel_size=p.pipeline,
        expert_model_parallel_size=p.expert,
        expert_tensor_parallel_size=p.expert_tensor,
        sequence_parallel=p.sequence_parallel,
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalize_gradients,
        variable_seq_lengths=p.pipeline > 1,  # micro-batches have shapes of their own
        # gloo sends asynchronously from a buffer that deallocation would take away.
        deallocate_pipeline_outputs=cuda,
        perform_initialization=False,
        attention_softmax_in_fp32=True,
        gradient_accumulation_fusion=use_te and _installed("fused_weight_gradient_mlp_cuda"),
        apply_rope_fusion=use_te and not architecture.interleaved_rope,
        masked_softmax_fusion=False,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        moe_grouped_gemm=use_te,
        moe_token_dispatcher_type="alltoall",
    )


def first_layer(config: TransformerConfig) -> int:
    """Global number of this pipeline stage's first layer."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return int(get_transformer_layer_offset(config, pp_rank=stage))


def build_module(
    run: RunConfig, architecture: Architecture, config: TransformerConfig, use_te: bool
) -> GPTModel:
    """This pipeline stage of the model, with parameters that are still undefined."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    first = first_layer(config)
    count = get_num_layers_to_build(config, pp_rank=stage)
    own = architecture.layer_specs(use_te)[first : first + count]
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=own, layer_norm=specs.final_norm(use_te)),
        padded_vocabulary(architecture.vocabulary, run.parallel.tensor),
        architecture.positions,
        pre_process=stage == 0,
        post_process=stage == run.parallel.pipeline - 1,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=architecture.tied,
    )
    model.rotary_pos_emb.inv_freq = architecture.inverse_frequencies().to(world.device())
    return model


def shards_optimizer(run: RunConfig) -> bool:
    """Whether optimizer state is sharded: asked for, and there is somebody to share it with."""
    return run.parallel.distributed_optimizer and run.data_parallel > 1


def wrap(run: RunConfig, config: TransformerConfig, module: GPTModel) -> DistributedDataParallel:
    """The module with gradient buffers, on its device and in its number format."""
    inner: torch.nn.Module = module.to(world.device())
    if config.bf16:
        inner = Float16Module(config, inner)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=shards_optimizer(run)
    )
    return DistributedDataParallel(config, ddp, inner)


def make_optimizer(
    run: RunConfig, config: TransformerConfig, chunk: DistributedDataParallel
) -> Any:
    """Megatron's AdamW over the wrapped module."""
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
    optimizer = get_megatron_optimizer(options, [chunk])
    config.grad_scale_func = optimizer.scale_loss
    if not torch.cuda.is_available():
        for group in optimizer.param_groups:
            group["fused"] = True  # one call for all parameters; Megatron does not ask for it
    return optimizer
