"""Quantizes by modelopt, checks bounds, and writes versions for an engine.

`python -m tests.generator.fp8_process FOLDER`, in a process of its own: modelopt's import takes
seconds and leaves hooks in other libraries.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.weights.buckets import tensor_info
from megatron_rl.weights.manifest import check_tensors
from megatron_rl.weights.number_format import SCALE_SUFFIX, WireFormat, quantize
from tests.generator import tiny_models
from tests.weights.test_wire import LLAMA4, E, F, L, checkpoint, dequantize
from tests.weights.versions import Versions

SEEDS = (1, 2, 1)
"""Of the weights of each version."""
WIRE = WireFormat(torch.bfloat16, fp8=True)


def check_bounds() -> None:
    """Check a matrix with a block of zeros, an outlier and a tiny element."""
    w = torch.randn(384, 256, generator=torch.Generator().manual_seed(3))
    w[:128, :128] = 0
    w[0, 200], w[300, 10] = 1e4, 1e-30
    stored, scale = quantize("w", w)
    assert stored.dtype == torch.float8_e4m3fn
    assert (stored.shape, scale.shape, scale.dtype) == (w.shape, (3, 2), torch.float32)
    back = dequantize(stored, scale)
    assert torch.isfinite(back).all()
    assert (back[:128, :128] == 0).all()
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    # Half a unit in the last of 4 significant bits; 2^-10 below the smallest normal number.
    bound = torch.maximum(w.abs() / 16, full * 2**-10) * (1 + 1e-5)
    assert ((back - w).abs() <= bound).all()
    torch.testing.assert_close(scale[0, 1], torch.tensor(1e4 / 448))
    blocks = (3, 128, 2, 128)
    largest = [t.view(blocks).abs().amax((1, 3)) for t in (back, w)]
    torch.testing.assert_close(*largest)  # a block's largest element is exact
    again, _ = quantize("w", w)
    assert torch.equal(again.view(torch.uint8), stored.view(torch.uint8))


def check_experts() -> None:
    """Check that Llama 4's fused experts travel one by one, as linear layers."""
    tensors = checkpoint()
    stream = dict(WIRE.stream(iter(tensors.items())))
    expected = WIRE.expected(LLAMA4)
    assert list(stream) == list(expected)
    check_tensors(tuple(tensor_info(n, t) for n, t in stream.items()), expected, 1)
    for e in range(E):
        both = tensors[f"{L}.feed_forward.experts.gate_up_proj"][e]
        down = tensors[f"{L}.feed_forward.experts.down_proj"][e]
        for part, matrix in (("gate", both[:, :F].T), ("up", both[:, F:].T), ("down", down.T)):
            name = f"{L}.feed_forward.experts.{e}.{part}_proj.weight"
            back = dequantize(stream[name], stream[name + SCALE_SUFFIX])
            assert back.shape == matrix.shape
            assert (back - matrix).abs().max() <= matrix.abs().max() / 16


def dequantized(stream: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the matrices of an engine's computation, by the checkpoint's names, in fp32."""
    return {
        n: dequantize(t, stream[n + SCALE_SUFFIX]) if n + SCALE_SUFFIX in stream else t.float()
        for n, t in stream.items()
        if not n.endswith(SCALE_SUFFIX)
    }


def write_versions(folder: Path) -> None:
    """Write versions, their manifests, and checkpoints that transformers loads for reference."""
    for version, seed in enumerate(SEEDS):
        model = tiny_models.build("qwen3_moe_fp8", seed)
        whole = folder / f"whole{version}"
        model.save_pretrained(whole)
        stream = dict(WIRE.stream(iter(tiny_models.checkpoint(whole).items())))
        manifest = Versions(folder / f"weights{version}", 100_000).write(version, stream)
        (folder / f"manifest{version}.json").write_bytes(msgspec.json.encode(manifest))
        model.save_pretrained(folder / f"rounded{version}")
        rounded = {n: t.contiguous() for n, t in dequantized(stream).items()}
        path = folder / f"rounded{version}" / "model.safetensors"
        save_file(rounded, path, metadata={"format": "pt"})


if __name__ == "__main__":
    check_bounds()
    check_experts()
    write_versions(Path(sys.argv[1]))
    print("QUANTIZED")
