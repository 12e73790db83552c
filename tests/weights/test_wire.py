"""Tensors as they travel: number formats, experts, FP8 with block scales; a generator's checks."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.messages import Manifest
from megatron_rl.weights.buckets import tensor_info
from megatron_rl.weights.manifest import WeightsError, check_tensors
from megatron_rl.weights.number_format import BLOCK, WireFormat, quantize
from megatron_rl.weights.transports import check_manifest, refuse_contradictions

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


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the fp32 matrix [out, in] that `quantize` stored."""
    full = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * full


def checkpoint(shapes=LLAMA4) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(7)
    return {n: torch.randn(s, generator=rng) * 0.02 for n, s in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_quantization_names_and_shapes_are_the_checkpoints(dtype):
    wire, tensors = WireFormat(dtype), checkpoint()
    stream = dict(wire.stream(iter(tensors.items())))
    assert list(stream) == list(LLAMA4)
    assert all(torch.equal(t, tensors[n].to(dtype)) for n, t in stream.items())
    expected = wire.expected(LLAMA4)
    infos = tuple(tensor_info(n, t) for n, t in stream.items())
    check_tensors(infos, expected, 1)
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
    experts = [
        f"{L}.feed_forward.experts.{e}.{p}_proj.weight"
        for e in range(E)
        for p in ("gate", "up", "down")
    ]
    quantized = {
        *experts,
        f"{L}.self_attn.q_proj.weight",
        f"{L}.feed_forward.shared_expert.up_proj.weight",
    }
    assert {n for n, i in expected.items() if i.dtype == "float8_e4m3fn"} == quantized
    assert {n for n, i in expected.items() if i.dtype == "float32"} == {
        n + "_scale_inv" for n in quantized
    }
    assert expected[experts[0]].shape == (F, H)  # gate [out, in]
    assert expected[experts[2]].shape == (H, F)  # down
    assert expected[experts[2] + "_scale_inv"].shape == (2, 1)
    whole = {n for n in expected if "layers" not in n or "norm" in n or "router" in n}
    assert {expected[n].dtype for n in whole} == {"bfloat16"}


def test_sizes_that_are_no_multiples_of_the_block_are_refused_with_the_name():
    with pytest.raises(WeightsError, match=rf"{L}.mlp.up_proj.weight is 96 x 128: FP8 with block"):
        WireFormat(torch.bfloat16, fp8=True).expected({f"{L}.mlp.up_proj.weight": (96, 128)})


def test_nccl_without_cuda_is_refused_with_the_key():
    config = RunConfig(weights={"transport": "nccl"})
    with pytest.raises(ConfigError, match="weights.transport is 'nccl': .* no CUDA"):
        refuse_contradictions(config, cuda=False)
    refuse_contradictions(config, cuda=True)
    refuse_contradictions(RunConfig(weights={"transport": "gloo"}), cuda=False)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (
            {"weights": {"transport": "gloo", "directory": "/dev/shm"}},
            "weights.directory is '/dev/shm': weights.transport = 'gloo' writes no files",
        ),
        (
            {"weights": {"quantization": "fp8"}, "precision": {"params": "fp32"}},
            "weights.quantization is 'fp8': precision.params = 'fp32'.*weights.dtype = 'bf16'",
        ),
    ],
)
def test_contradictions_of_a_configuration_name_both_keys(tree, text):
    with pytest.raises(ValueError, match=text):
        RunConfig.model_validate(tree)
    tree = {k: v | {"dtype": "bf16"} if k == "weights" else v for k, v in tree.items()}
    if "precision" in tree:
        assert WireFormat.of(RunConfig.model_validate(tree)).fp8


def test_a_version_of_another_transport_is_refused():
    manifest = Manifest(version=3, path="", buckets=(), checksums=(), tensors=(), num_bytes=0,
                        transport="gloo")  # fmt: skip
    with pytest.raises(WeightsError, match="version 3 came by 'gloo', and this generator has"):
        check_manifest(RunConfig(), manifest)


def test_dequantize_is_the_inverse_of_the_stored_form():
    weight = torch.ones(256, 128).to(torch.float8_e4m3fn)
    scale = torch.tensor([[2.0], [3.0]])
    full = dequantize(weight, scale)
    assert (full[:128] == 2).all()
    assert (full[128:] == 3).all()
    quantized, scales = quantize("w", torch.empty(256, 128, device="meta"))
    assert quantized.dtype == torch.float8_e4m3fn
    assert scales.shape == (2, 1)
