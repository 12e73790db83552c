"""The form in which a version's tensors travel: experts, number format, quantization.

Names, shapes and values are those of the checkpoint, which every vLLM loads, with one exception:
quantized weights.

- Experts travel one by one, in the form [out, in] of a linear layer, `experts.3.gate_proj.weight`
  and so on, also where the checkpoint has all in one tensor (Llama 4: `experts.gate_up_proj`
  [E, H, 2F] and `experts.down_proj` [E, F, H]), so that no rank joins the experts of others.
- FP8. `X.weight` becomes `X.weight` (e4m3) and `X.weight_scale_inv` (fp32, one factor per block of
  128 x 128), for every `*_proj` of the layers. Norms, routers, embedding and head stay as they are.

The same functions make the trainer's stream and, on `meta`, the tensors that a generator expects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config import RunConfig
from megatron_rl.messages import TensorInfo
from megatron_rl.weights.buckets import tensor_info
from megatron_rl.weights.manifest import WeightsError

BLOCK = 128  # rows and columns with one scale
SCALE_SUFFIX = "_scale_inv"

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_QUANTIZED = re.compile(r".*layers\.\d+\..*_proj\.weight")

Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The form in which tensors travel; `dtype` is that of all which are not quantized.

    Example: `WireFormat(torch.bfloat16, fp8=True).stream(iter([("layers.0.up_proj.weight", w)]))`
    yields the e4m3 weight and its block scales.
    """

    dtype: torch.dtype
    fp8: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> WireFormat:
        """Return the format of a run."""
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.generator_dtype]
        return cls(dtype, fp8=config.weights.quantization == "fp8")

    def stream(self, stream: Iterator[Named]) -> Iterator[Named]:
        """Yield the checkpoint's tensors as they travel; raises as `quantize`."""
        for name, tensor in stream:
            for single, matrix in _experts_one_by_one(name, tensor):
                if self.fp8 and is_quantized(single):
                    weight, scale = quantize(single, matrix)
                    yield single, weight
                    yield single + SCALE_SUFFIX, scale
                else:
                    yield single, matrix.to(self.dtype)

    def expected(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
        """Return the entries of every version, by name, from the shapes of the trained tensors."""
        empty = ((n, torch.empty(s, dtype=self.dtype, device="meta")) for n, s in shapes.items())
        return {name: tensor_info(name, tensor) for name, tensor in self.stream(empty)}


def is_quantized(name: str) -> bool:
    """Return True if FP8 quantizes the matrix of this name."""
    return _QUANTIZED.fullmatch(name) is not None


def quantize(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix [out, in] by modelopt's FP8 with a scale per block.

    Returns:
        (e4m3 [out, in], fp32 factors [out / BLOCK, in / BLOCK]); their product is the weight, up to
        1/16 of each element or, for small ones, 2^-10 of the block's factor.

    Raises:
        WeightsError: sizes that are no multiples of `BLOCK`.
    """
    rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK:
        raise WeightsError(
            f"{name} is {rows} x {columns}: FP8 with block scales needs multiples of {BLOCK} (of"
            " vLLM's fused layers as well); set weights.quantization to 'none' for this model"
        )
    if weight.is_meta:
        blocks = (rows // BLOCK, columns // BLOCK)
        return weight.to(torch.float8_e4m3fn), torch.empty(blocks, device="meta")
    # Imported here, because it takes seconds.
    from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
    from modelopt.torch.quantization.utils import reduce_block_amax

    sizes = {-1: BLOCK, -2: BLOCK}
    full = weight.float()
    # A block of zeros has scale 0 in modelopt, and 0 / 0 is not a number.
    tiny = torch.finfo(torch.float32).tiny
    scale = (reduce_block_amax(full, sizes) / _LARGEST).clamp(min=tiny)
    quantized, scale = FP8QTensor.quantize(full, scales=scale, block_sizes=sizes)
    return quantized._quantized_data, scale


def single_expert(name: str, expert: int, matrix: Tensor) -> Iterator[Named]:
    """Yield the matrices of an expert of this fused tensor, [in, out] in, [out, in] out.

    Raises:
        ValueError: not the name of a fused tensor.
    """
    if (match := _FUSED_EXPERTS.fullmatch(name)) is None:
        raise ValueError(f"{name} is not the name of a tensor of all experts")
    experts, kind = match.groups()
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for part, columns in zip(parts, matrix.t().chunk(len(parts)), strict=True):
        yield f"{experts}.{expert}.{part}.weight", columns.contiguous()


def _experts_one_by_one(name: str, tensor: Tensor) -> Iterator[Named]:
    if _FUSED_EXPERTS.fullmatch(name) is None:
        return iter([(name, tensor)])
    return (named for i, one in enumerate(tensor) for named in single_expert(name, i, one))
