"""Tensors as they travel: number formats, experts one by one, FP8 with block scales."""

from __future__ import annotations

import msgspec
import pytest
import torch

from megatron_rl.config import RunConfig
from megatron_rl.weights.buckets import tensor_info
from megatron_rl.weights.manifest import WeightsError, check_tensors
from megatron_rl.weights.number_format import BLOCK, WireFormat, quantize

L, E, H, F = "model.layers.0", 2, 256, 128
LLAMA4 = {
    "model.embed_tokens.weight": (64, H),
    f"{L}.input_layernorm.weight": (H,),
    f"{L}.self_attn.q_proj.weight": (H, H),
    f"{L}.feed_forward.router.weight": (E, H),
    f"{L}.feed_forward.experts.gate_up_proj": (E, H, 2 * F),
    f"{L}.feed_forward.experts.down_proj": (E, F, H),
    f"{L}.feed_forward.shared_expert.up_proj.weight": (F, H),
    "lm_head.weight": (64, H),
}
FUSED = ("gate_up_proj", "down_proj")


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the fp32 matrix [out, in] that `quantize` stored."""
    full = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * full


def checkpoint(shapes=LLAMA4) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(7)
    return {n: torch.randn(s, generator=rng) * 0.02 for n, s in shapes.items()}


EXPERTS = [
    f"{L}.feed_forward.experts.{e}.{p}_proj.weight"
    for e in range(E)
    for p in ("gate", "up", "down")
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_and_values_are_the_checkpoints_and_experts_travel_one_by_one(dtype):
    wire, tensors = WireFormat(dtype), checkpoint()
    stream = dict(wire.stream(iter(tensors.items())))
    fused = {n: tensors.pop(n) for n in LLAMA4 if n.rpartition(".")[2] in FUSED}
    gate_up, down = fused.values()
    for e in range(E):  # [in, out] in the checkpoint's tensors, [out, in] on the wire
        gate, up = gate_up[e].T.chunk(2)
        tensors |= zip(EXPERTS[3 * e : 3 * e + 3], (gate, up, down[e].T), strict=True)
    assert sorted(stream) == sorted(tensors)
    assert all(torch.equal(t, tensors[n].to(dtype)) for n, t in stream.items())
    expected = wire.expected(LLAMA4)
    infos = tuple(tensor_info(n, t) for n, t in stream.items())
    check_tensors(infos, expected, 1)
    for change in ({"dtype": "float16"}, {"shape": (1, 2)}):
        wrong = msgspec.structs.replace(infos[0], **change)
        with pytest.raises(WeightsError, match=rf"{wrong.name} is .*, the engine takes"):
            check_tensors((wrong, *infos[1:]), expected, 1)
    assert {i.dtype for i in expected.values()} == {str(dtype).removeprefix("torch.")}


def test_the_format_of_a_run():
    run = RunConfig(precision={"params": "fp32"})
    assert WireFormat.of(run) == WireFormat(torch.float32)
    run = RunConfig(precision={"params": "fp32"}, weights={"dtype": "bf16"})
    assert WireFormat.of(run) == WireFormat(torch.bfloat16)
    assert run.generator_dtype == "bf16"
    run = RunConfig(weights={"quantization": "fp8"})
    assert WireFormat.of(run) == WireFormat(torch.bfloat16, fp8=True)


def test_fp8_expects_one_matrix_per_expert_and_one_scale_per_block():
    expected = WireFormat(torch.bfloat16, fp8=True).expected(LLAMA4)
    quantized = {
        *EXPERTS,
        f"{L}.self_attn.q_proj.weight",
        f"{L}.feed_forward.shared_expert.up_proj.weight",
    }
    assert {n for n, i in expected.items() if i.dtype == "float8_e4m3fn"} == quantized
    assert {n for n, i in expected.items() if i.dtype == "float32"} == {
        n + "_scale_inv" for n in quantized
    }
    assert expected[EXPERTS[0]].shape == (F, H)  # gate [out, in]
    assert expected[EXPERTS[2]].shape == (H, F)  # down
    assert expected[EXPERTS[2] + "_scale_inv"].shape == (2, 1)
    whole = {n for n in expected if "layers" not in n or "norm" in n or "router" in n}
    assert {expected[n].dtype for n in whole} == {"bfloat16"}


def test_sizes_that_are_no_multiples_of_the_block_are_refused_with_the_name():
    with pytest.raises(WeightsError, match=rf"{L}.mlp.up_proj.weight is 96 x 128: FP8 with block"):
        WireFormat(torch.bfloat16, fp8=True).expected({f"{L}.mlp.up_proj.weight": (96, 128)})


def test_fp8_of_fp32_weights_is_refused_and_names_both_keys():
    tree = {"weights": {"quantization": "fp8"}, "precision": {"params": "fp32"}}
    text = "weights.quantization is 'fp8': precision.params = 'fp32'.*weights.dtype = 'bf16'"
    with pytest.raises(ValueError, match=text):
        RunConfig.model_validate(tree)
    tree["weights"]["dtype"] = "bf16"
    assert WireFormat.of(RunConfig.model_validate(tree)).fp8


def test_dequantize_is_the_inverse_of_the_stored_form():
    weight = torch.ones(256, 128).to(torch.float8_e4m3fn)
    scale = torch.tensor([[2.0], [3.0]])
    full = dequantize(weight, scale)
    assert (full[:128] == 2).all()
    assert (full[128:] == 3).all()
    quantized, scales = quantize("w", torch.empty(256, 128, device="meta"))
    assert quantized.dtype == torch.float8_e4m3fn
    assert scales.shape == (2, 1)
