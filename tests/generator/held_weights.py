"""The weights that an engine holds now, by Hugging Face name, to be compared with an export.

vLLM's CPU build keeps no plain copy: linear weights are packed into oneDNN's or SGL's layout and
expert weights into that of its grouped GEMM, query/key/value and gate/up projections are fused,
and Llama 4's queries and keys are permuted for its rotary embedding. Each step is undone exactly:

- a linear layer is applied to the identity: every product is a weight times one, plus zeros;
- expert weights are packed by a permutation, found by packing the numbers 0, 1, 2, ...
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megatron_rl.generator.weight_transfer import WorkerExtension

EXTENSION = f"{__name__}.ReadableWorker"
"""`vllm_args.WORKER_EXTENSION` of engines whose weights are read back."""

_KINDS = (
    "LlamaForCausalLM",
    "Llama4ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""vLLM's classes whose weights can be read back."""


async def held_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return the weights that an engine with `EXTENSION` holds now, by Hugging Face name."""
    async with engine._one_version:
        (path, *_) = await engine._llm.collective_rpc("save_held_weights")
    weights = load_file(path)
    Path(path).unlink()
    return weights


class ReadableWorker(WorkerExtension):
    """The shipped extension, and a call that reads the weights back."""

    model_runner: Any
    vllm_config: Any

    def save_held_weights(self) -> str:
        """Write the weights into a new safetensors file and return its path.

        Raises:
            NotImplementedError: another platform, model, or tensor-parallel size than it can undo.
        """
        model = self.model_runner.model
        _refuse_unknown(model, self.vllm_config.parallel_config.tensor_parallel_size)
        with torch.no_grad():
            weights = {name: tensor.contiguous() for name, tensor in weights_of(model)}
        with tempfile.NamedTemporaryFile(
            prefix="held_weights_", suffix=".safetensors", delete=False
        ) as file:
            save_file(weights, file.name)
        return file.name


def weights_of(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of every weight of a vLLM model on CPU, whose class is in `_KINDS`."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import (
        LinearBase,
        MergedColumnParallelLinear,
        QKVParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    rotated = type(model).__name__ == "Llama4ForCausalLM"
    for name, module in model.named_modules():
        prefix = name.rpartition(".")[0]
        if isinstance(module, RoutedExperts):
            # The checkpoint's tensors sit one level higher.
            gate_up = _unpack_experts(module, "w13_weight")
            down = _unpack_experts(module, "w2_weight")
            if rotated:  # Llama 4: all experts in one tensor, transposed
                yield f"{prefix}.gate_up_proj", gate_up.mT
                yield f"{prefix}.down_proj", down.mT
                continue
            for expert, (both, last) in enumerate(zip(gate_up, down, strict=True)):
                for kind, part in zip(("gate", "up"), both.chunk(2), strict=True):
                    yield f"{prefix}.{expert}.{kind}_proj.weight", part
                yield f"{prefix}.{expert}.down_proj.weight", last
        elif isinstance(module, QKVParallelLinear):
            q, k, v = _linear_weight(module).split(module.output_sizes)
            if rotated:
                q = _undo_rotary_order(q, module.total_num_heads)
                k = _undo_rotary_order(k, module.total_num_kv_heads)
            for letter, part in (("q", q), ("k", k), ("v", v)):
                yield f"{prefix}.{letter}_proj.weight", part
        elif isinstance(module, MergedColumnParallelLinear):
            gate, up = _linear_weight(module).split(module.output_sizes)
            yield f"{prefix}.gate_proj.weight", gate
            yield f"{prefix}.up_proj.weight", up
        elif isinstance(module, ParallelLMHead):
            packed = _linear_weight(module)
            if not torch.equal(packed, module.weight):
                raise RuntimeError(f"{name}: the packed weight is not the plain one")
            if module.weight is not model.model.embed_tokens.weight:
                yield f"{name}.weight", packed[: module.org_vocab_size]
        elif isinstance(module, VocabParallelEmbedding):
            yield f"{name}.weight", module.weight[: module.org_vocab_size].clone()
        elif isinstance(module, LinearBase):
            yield f"{name}.weight", _linear_weight(module)
        elif isinstance(module, RMSNorm) and "weight" in module._parameters:
            yield f"{name}.weight", module.weight.clone()


def _refuse_unknown(model: Any, tensor_parallel: int) -> None:
    from vllm.platforms import current_platform

    kind = type(model).__name__
    if not current_platform.is_cpu() or kind not in _KINDS or tensor_parallel != 1:
        raise NotImplementedError(
            f"weights held by a {kind} on {current_platform.device_type} with tensor parallel"
            f" {tensor_parallel}: {', '.join(_KINDS)} on one CPU rank are read back"
        )


def _linear_weight(layer: Any) -> torch.Tensor:
    """[out, in], through the product that the model itself uses."""
    if getattr(layer, "bias", None) is not None:
        raise NotImplementedError(f"{layer.prefix}: linear layers with a bias are not read back")
    size = getattr(layer, "input_size", None) or layer.embedding_dim
    identity = torch.eye(size, dtype=layer.weight.dtype)
    return layer.cpu_linear(identity, layer.weight, None).T.to(layer.weight.dtype)


def _unpack_experts(layer: Any, parameter: str) -> torch.Tensor:
    """[experts, out, in] of a packed expert weight."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    packed = getattr(layer, parameter)
    isa = layer.quant_method.moe_kernel.fused_experts.isa
    # Packing moves elements only within an expert. Places are packed digit by digit, since only
    # whole numbers below 2^8 in bf16 and 2^24 in fp32 are all exact.
    experts, rows, columns = packed.shape
    index = torch.arange(rows * columns).view(1, rows, columns)
    base = 1 << (8 if packed.element_size() == 2 else 24)
    place, scale = torch.zeros(rows * columns, dtype=torch.int64), 1
    while scale < rows * columns:
        digit = (index // scale % base).to(packed.dtype)
        place += scale * cpu_prepack_moe_weight(digit, isa).flatten().to(torch.int64)
        scale *= base
    plain = torch.empty_like(packed).view(experts, -1)
    plain[:, place] = packed.view(experts, -1)
    return plain.view(experts, rows, columns)


def _undo_rotary_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    # Inverse of vLLM's `permute_qk_weight_for_rotary`: halves back to interleaved pairs.
    out, size = weight.shape
    return weight.view(heads, 2, out // heads // 2, size).transpose(1, 2).reshape(out, size)
