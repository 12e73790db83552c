"""The weights that an engine holds now, by the names of a version, to be compared with an export.

vLLM's CPU build keeps no plain copy: linear weights are packed into oneDNN's or SGL's layout and
expert weights into that of its grouped GEMM, query/key/value and gate/up projections are fused,
and Llama 4's queries and keys are permuted for its rotary embedding. Each step is undone exactly:

- a linear layer is applied to the identity: every product is a weight times one, plus zeros;
- expert weights are packed by a permutation, found by packing the numbers 0, 1, 2, ...

Tensor-parallel workers hold parts, which are joined; where all hold the same, they are compared.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

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
    """Return the weights that an engine with `EXTENSION` holds now, by name; experts one by one."""
    async with engine._one_version:
        paths = await engine._llm.collective_rpc("save_held_weights")
    parts: dict[str, list[torch.Tensor]] = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            places = json.loads(file.metadata()["places"])
            for name in file.keys():  # noqa: SIM118
                parts.setdefault(name, []).append(file.get_tensor(name))
        Path(path).unlink()
    return {name: _joined(name, tensors, *places[name]) for name, tensors in parts.items()}


def _joined(name: str, parts: list[torch.Tensor], dim: int | None, replicas: int) -> torch.Tensor:
    """Join the parts of all workers; `replicas` neighbors hold the same one, all if dim is None."""
    if dim is None:
        replicas = len(parts)
    for i, part in enumerate(parts):
        assert part.equal(parts[i - i % replicas]), f"{name}: workers hold different replicas"
    return torch.cat(parts[::replicas], dim or 0)


class ReadableWorker(WorkerExtension):
    """The shipped extension, and a call that reads the weights back."""

    model_runner: Any
    vllm_config: Any

    def save_held_weights(self) -> str:
        """Write the weights into a new safetensors file and return its path.

        Raises:
            NotImplementedError: another platform or model than it can undo.
        """
        model = self.model_runner.model
        _refuse_unknown(model)
        weights, places = {}, {}
        with torch.no_grad():
            for name, tensor, *place in weights_of(model):
                weights[name], places[name] = tensor.contiguous(), place
        with tempfile.NamedTemporaryFile(
            prefix="held_weights_", suffix=".safetensors", delete=False
        ) as file:
            save_file(weights, file.name, metadata={"places": json.dumps(places)})
        return file.name


Part = tuple[str, torch.Tensor, int | None, int]
"""Name, tensor, dimension along which workers split it (None: all have it), workers per part."""


def weights_of(model: Any) -> Iterator[Part]:
    """Yield the part of every weight of a vLLM model on CPU, whose class is in `_KINDS`."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import (
        LinearBase,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
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
            size = module.moe_config.intermediate_size_per_partition_unpadded
            for expert, (both, last) in enumerate(zip(gate_up, down, strict=True)):
                gate, up = (_without_padding(part, size) for part in both.chunk(2))
                last = _without_padding(last.T, size).T
                for kind, part in ("gate", gate), ("up", up):
                    yield f"{prefix}.{expert}.{kind}_proj.weight", part, 0, 1
                yield f"{prefix}.{expert}.down_proj.weight", last, 1, 1
        elif isinstance(module, QKVParallelLinear):
            heads = [module.num_heads, module.num_kv_heads, module.num_kv_heads]
            q, k, v = _linear_weight(module).split([n * module.head_size for n in heads])
            if rotated:
                q, k = _undo_rotary_order(q, heads[0]), _undo_rotary_order(k, heads[1])
            yield f"{prefix}.q_proj.weight", q, 0, 1
            for letter, part in (("k", k), ("v", v)):
                yield f"{prefix}.{letter}_proj.weight", part, 0, module.num_kv_head_replicas
        elif isinstance(module, MergedColumnParallelLinear):
            gate, up = _linear_weight(module).chunk(2)
            yield f"{prefix}.gate_proj.weight", gate, 0, 1
            yield f"{prefix}.up_proj.weight", up, 0, 1
        elif isinstance(module, ParallelLMHead):
            packed = _linear_weight(module)
            if not torch.equal(packed, module.weight):
                raise RuntimeError(f"{name}: the packed weight is not the plain one")
            if module.weight is not model.model.embed_tokens.weight:
                yield f"{name}.weight", packed[: module.shard_indices.num_org_elements], 0, 1
        elif isinstance(module, VocabParallelEmbedding):
            rows = module.shard_indices.num_org_elements
            yield f"{name}.weight", module.weight[:rows].clone(), 0, 1
        elif isinstance(module, LinearBase):
            dim = 1 if isinstance(module, RowParallelLinear) else None
            yield f"{name}.weight", _linear_weight(module), dim, 1
        elif isinstance(module, RMSNorm) and "weight" in module._parameters:
            yield f"{name}.weight", module.weight.clone(), None, 1


def _refuse_unknown(model: Any) -> None:
    from vllm.platforms import current_platform

    kind = type(model).__name__
    if not current_platform.is_cpu() or kind not in _KINDS:
        raise NotImplementedError(
            f"weights held by a {kind} on {current_platform.device_type}: {', '.join(_KINDS)} on"
            " CPU are read back"
        )


def _linear_weight(layer: Any) -> torch.Tensor:
    """[out, in], through the product that the model itself uses."""
    if getattr(layer, "bias", None) is not None:
        raise NotImplementedError(f"{layer.prefix}: linear layers with a bias are not read back")
    size = getattr(layer, "input_size_per_partition", None) or getattr(layer, "input_size", None)
    size = size or layer.embedding_dim
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


def _without_padding(weight: torch.Tensor, rows: int) -> torch.Tensor:
    assert not weight[rows:].any(), "the rows that vLLM adds to a part of an expert are not zero"
    return weight[:rows]


def _undo_rotary_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    # Inverse of vLLM's `permute_qk_weight_for_rotary`: halves back to interleaved pairs.
    out, size = weight.shape
    return weight.view(heads, 2, out // heads // 2, size).transpose(1, 2).reshape(out, size)
