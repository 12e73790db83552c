"""Transformer Engine on CPU: what Megatron-Core takes of it, with the signatures of two releases.

`install` puts modules in place of the package, before Megatron-Core is imported. The parameters of
every constructor and function are those of transformer-engine 2.10.0 and 2.20.2, in their order; an
argument that a release does not have is a TypeError. The mathematics is written from its
documentation and kernels (`common/fused_rope/fused_rope.cu`), in fp32, without tensor parallelism.
Its kernels and FP8 are not exercised.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

OLD, NEW = "2.10.0", "2.20.2"
_PARALLEL = "sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker"
_UB = "ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad"
_ATTENTION = (
    "num_attention_heads kv_channels / num_gqa_groups attention_dropout qkv_format attn_mask_type"
    " window_size {} sequence_parallel tp_size get_rng_state_tracker tp_group layer_number"
    " attention_type cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale softmax_type"
    " return_max_logit {}"
)
_ATTEND = (
    "query_layer key_layer value_layer / attention_mask qkv_format cu_seqlens_q cu_seqlens_kv"
    " cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type"
    " window_size {} checkpoint_core_attention core_attention_bias_type core_attention_bias"
    " alibi_slopes fast_zero_fill inference_params pad_between_seqs fp8_output {}"
)
_GROUPED = (
    f"num_gemms in_features out_features / {_PARALLEL} rng_tracker_name init_method bias"
    " return_bias params_dtype parallel_mode device ub_overlap_rs ub_overlap_ag ub_name"
    " delay_wgrad_compute save_original_input {}"
)
_UNPERMUTE = "inp row_id_map / merging_probs restore_shape map_type probs {}"
SIGNATURES = {
    "Linear": f"in_features out_features / {_PARALLEL} rng_tracker_name init_method bias"
    f" return_bias params_dtype parallel_mode parameters_split device {_UB} ub_bulk_dgrad"
    " ub_bulk_wgrad ub_name delay_wgrad_compute symmetric_ar_type save_original_input name",
    "LayerNormLinear": f"in_features out_features / eps {_PARALLEL} init_method bias normalization"
    " return_bias params_dtype parallel_mode return_layernorm_output"
    f" return_layernorm_output_gathered parameters_split zero_centered_gamma device {_UB}"
    " ub_bulk_wgrad ub_bulk_dgrad ub_name delay_wgrad_compute symmetric_ar_type name",
    "RMSNorm": "/ normalized_shape eps sequence_parallel params_dtype zero_centered_gamma"
    " hidden_size device dtype sm_margin",
    "linear": "inp / is_first_microbatch fp8_output fp8_grad",
    "rope": "t freqs / tensor_format start_positions interleaved fused cu_seqlens cp_size cp_rank",
    "permute": "inp probs routing_map num_out_tokens /",
    "sort": "inp split_sizes sorted_index /",
    "sort with probs": "inp probs split_sizes sorted_index /",
}
BY_RELEASE = {
    OLD: {
        "GroupedLinear": _GROUPED.format(""),
        "grouped": "inp m_splits / is_first_microbatch",
        "DotProductAttention": _ATTENTION.format("", ""),
        "attention": _ATTEND.format("", "num_splits"),
        "unpermute": _UNPERMUTE.format(""),
    },
    NEW: {
        "GroupedLinear": _GROUPED.format(
            "single_grouped_weight single_grouped_bias name use_grouped_tensor"
        ),
        "grouped": "inp m_splits / is_first_microbatch out dgrad_out",
        "DotProductAttention": _ATTENTION.format("bottom_right_diagonal softcap", "name"),
        "attention": _ATTEND.format(
            "bottom_right_diagonal softcap",
            "bf16_backward num_splits score_mod score_mod_bprop score_mod_tensors"
            " score_mod_bprop_tensors qkv_layer kv_layer qkv_interleave_dim"
            " thd_attention_policies thd_attention_policy_dispatch",
        ),
        "unpermute": _UNPERMUTE.format("pad_offsets"),
    },
}
release = NEW
attended: list[int] = []
"""Number of sequences of each call of the attention."""
calls: Counter[str] = Counter()
"""Of fused functions."""


def bound(name: str, *args: Any, **kwargs: Any) -> SimpleNamespace:
    """Bind arguments as the function of that name in this release does; others are None."""
    needed, _, rest = (SIGNATURES | BY_RELEASE[release])[name].partition("/")
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(n, kind) for n in needed.split()]
    parameters += [inspect.Parameter(n, kind, default=None) for n in rest.split()]
    binding = inspect.Signature(parameters).bind(*args, **kwargs)
    binding.apply_defaults()
    return SimpleNamespace(**binding.arguments)


class _Product(torch.autograd.Function):
    """x w^T; the weight's gradient goes into `main_grad` where it is fused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: bool, first: bool | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.fused, ctx.first = weight, fused, first
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        product = grad.flatten(0, -2).T @ x.flatten(0, -2)
        calls["weight gradient" if ctx.fused else "weight gradient by autograd"] += 1
        if ctx.fused:
            if not ctx.first:  # the first micro-batch overwrites
                product = product + ctx.weight.main_grad
            ctx.weight.main_grad.copy_(product)
            ctx.weight.grad_added_to_main_grad = True
            product = torch.full_like(weight, torch.nan)  # there, memory that is not written
        return grad @ weight, product, None, None


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = bound("RMSNorm", *args, **kwargs)
        assert not given.zero_centered_gamma
        self.eps = given.eps
        self.weight = torch.nn.Parameter(torch.ones(given.normalized_shape or given.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return _normed(x, self.weight, self.eps)


class Linear(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = bound(self.kind, *args, **kwargs)
        assert given.tp_size == 1
        assert not given.bias
        self.fuse_wgrad_accumulation = given.fuse_wgrad_accumulation
        self.make(given)

    kind = "Linear"

    def make(self, given: SimpleNamespace) -> None:
        self.weight = torch.nn.Parameter(torch.empty(given.out_features, given.in_features))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = bound("linear", *args, **kwargs)
        return self.product(given.inp, self.weight, given.is_first_microbatch)

    def product(self, x: Tensor, weight: Tensor, first: bool | None) -> Tensor:
        out: Tensor = _Product.apply(x, weight, self.fuse_wgrad_accumulation, first)
        return out


class LayerNormLinear(Linear):
    kind = "LayerNormLinear"

    def make(self, given: SimpleNamespace) -> None:
        super().make(given)
        assert given.normalization == "RMSNorm"
        self.eps = given.eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(given.in_features))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = bound("linear", *args, **kwargs)
        normed = _normed(given.inp, self.layer_norm_weight, self.eps)
        return self.product(normed, self.weight, given.is_first_microbatch)


class GroupedLinear(Linear):
    kind = "GroupedLinear"

    def make(self, given: SimpleNamespace) -> None:
        self.num_gemms = given.num_gemms
        for i in range(given.num_gemms):
            shape = (given.out_features, given.in_features)
            self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.empty(shape)))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = bound("grouped", *args, **kwargs)
        parts = given.inp.split(list(given.m_splits))
        return torch.cat(
            [
                self.product(part, getattr(self, f"weight{i}"), given.is_first_microbatch)
                for i, part in enumerate(parts)
            ]
        )


class DotProductAttention(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.scale = bound("DotProductAttention", *args, **kwargs).softmax_scale

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """thd, causal, without padding between sequences; nothing is read from the device."""
        given = bound("attention", *args, **kwargs)
        assert given.attention_mask is None
        assert (given.qkv_format, given.attn_mask_type) == ("thd", "padding_causal")
        # None would make it compare on the device.
        assert given.pad_between_seqs is False
        assert isinstance(given.max_seqlen_q, int)
        ends = given.cu_seqlens_q
        assert ends.dtype == torch.int32
        attended.append(len(ends) - 1)
        at = torch.arange(len(given.query_layer))
        sequence = torch.bucketize(at, ends[1:], right=True)
        allowed = (sequence[:, None] == sequence[None, :]) & (at[:, None] >= at[None, :])
        query, key, value = (
            x.transpose(0, 1) for x in (given.query_layer, given.key_layer, given.value_layer)
        )
        context = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, scale=self.scale, enable_gqa=True
        )
        return context.transpose(0, 1).flatten(1)


def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Tensor:
    """As `fused_rope_block_forward`: sbhd, angles [s, 1, 1, d] in fp32."""
    given = bound("rope", *args, **kwargs)
    t, angles = given.t, given.freqs
    calls["interleaved rope" if given.interleaved else "rope"] += 1
    assert given.fused
    assert given.tensor_format == "sbhd"
    assert given.cu_seqlens is None
    assert angles.shape == (len(t), 1, 1, t.shape[-1])
    if given.interleaved:
        rotated = torch.stack([-t[..., 1::2], t[..., 0::2]], dim=-1).flatten(-2)
    else:
        half = t.shape[-1] // 2
        rotated = torch.cat([-t[..., half:], t[..., :half]], dim=-1)
    return (t * angles.float().cos() + rotated * angles.float().sin()).to(t.dtype)


def moe_permute_with_probs(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = bound("permute", *args, **kwargs)
    calls["permute"] += 1
    chosen = given.routing_map.bool().T
    tokens = chosen.nonzero()[:, 1]
    assert len(tokens) == given.num_out_tokens > 0
    return given.inp[tokens], given.probs.T[chosen], tokens


def moe_unpermute(*args: Any, **kwargs: Any) -> Tensor:
    given = bound("unpermute", *args, **kwargs)
    assert given.merging_probs is None
    return given.inp.new_zeros(given.restore_shape).index_add(0, given.row_id_map, given.inp)


def moe_sort_chunks_by_index(*args: Any, **kwargs: Any) -> Tensor:
    given = bound("sort", *args, **kwargs)
    parts = given.inp.split(given.split_sizes.tolist())
    return torch.cat([parts[i] for i in given.sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    given = bound("sort with probs", *args, **kwargs)
    order = (given.split_sizes, given.sorted_index)
    return moe_sort_chunks_by_index(given.inp, *order), moe_sort_chunks_by_index(
        given.probs, *order
    )


def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: object = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: object = None,
    ub_type: object = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
) -> tuple[Tensor, None, None, None]:
    """op(B) op(A), BLAS's column-major view of row-major tensors: "TN" is B A^T, "NN" is B A."""
    for t in (A, B, out):
        assert t is None or t.is_contiguous(), "strides are not read"
    a, b = A.float(), B.float()
    product = (b.T if layout[1] == "T" else b) @ (a.T if layout[0] == "T" else a)
    assert bias is None
    if out is None:
        return product.to(out_dtype or A.dtype), None, None, None
    assert out.dtype == out_dtype
    out.copy_(out + product if accumulate else product)
    return out, None, None, None


def general_gemm_of_2_9(
    A: Tensor, B: Tensor, workspace: Tensor, out_dtype: torch.dtype | None = None, **_: Any
) -> None:
    """Take what the older one takes."""


class _Unused:
    """A name that Megatron imports and a bf16 or fp32 run does not call."""


def modules(version: str) -> dict[str, ModuleType]:
    """Return the package's modules by name."""
    contents: dict[str, dict[str, Any]] = {
        "": {"__version__": version},
        ".common": {},
        ".common.recipe": {"DelayedScaling": _Unused},
        ".pytorch": {
            kind.__name__: kind
            for kind in (RMSNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention)
        }
        | {"LayerNorm": RMSNorm},
        ".pytorch.attention": {},
        ".pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
        ".pytorch.cpp_extensions": {"general_gemm": general_gemm},
        ".pytorch.distributed": dict.fromkeys(
            ("CudaRNGStatesTracker", "activation_recompute_forward"), _Unused
        ),
        ".pytorch.fp8": dict.fromkeys(
            ("FP8GlobalStateManager", "fp8_autocast", "fp8_model_init"), _Unused
        ),
        ".pytorch.permutation": {
            "moe_permute": _Unused,
            "moe_permute_with_probs": moe_permute_with_probs,
            "moe_sort_chunks_by_index": moe_sort_chunks_by_index,
            "moe_sort_chunks_by_index_with_probs": moe_sort_chunks_by_index_with_probs,
            "moe_unpermute": moe_unpermute,
        },
        ".pytorch.tensor": {"QuantizedTensor": _Unused},
        ".pytorch.router": dict.fromkeys(
            (
                *("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"),
                "fused_topk_with_score_function",
            ),
            _Unused,
        ),
    }
    out = {}
    for name, values in contents.items():
        module = ModuleType(f"transformer_engine{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.__path__ = []
        vars(module).update(values)
        out[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(out[parent], child, module)
    return out


def install(version: str) -> None:
    """Put the modules of a release into this process."""
    global release
    release = version
    sys.modules.update(modules(version))
