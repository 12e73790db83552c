"""The transformers implementation is the reference: same logits, same gradients, same file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from megatron_rl.models import CheckpointError
from megatron_rl.models.packing import Rows
from megatron_rl.models.safetensors_directory import SafetensorsDirectory
from megatron_rl.trainer import hf_checkpoint
from megatron_rl.trainer.export import export
from megatron_rl.trainer.hf_checkpoint import save_huggingface
from megatron_rl.trainer.model import Policy
from tests.trainer.cases import (
    gradients,
    run_config,
    world_of_one,
    write_model,
    write_multimodal,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHORT = {"attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.3}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny_scout": ("tiny_scout", {}),
    # 40 positions: beyond two chunks, and beyond four steps of the temperature.
    "scout_beyond_chunk": ("tiny_scout", SHORT),
    "scout_no_temperature": ("tiny_scout", {**SHORT, "attn_temperature_tuning": False}),
    "scout_no_qk_norm": ("tiny_scout", {"use_qk_norm": False}),
    "scout_scaled_rope": ("tiny_scout", {"rope_parameters": LLAMA3_ROPE}),
    "maverick_dense_layers": (
        "tiny_scout",
        {"moe_layers": [1], "interleave_moe_layer_step": 2, "num_key_value_heads": 1},
    ),
    "tiny_dense": ("tiny_dense", {}),
    "dense_grouped_query": ("tiny_dense", GROUPED),
    "dense_scaled_rope": ("tiny_dense", {"rope_parameters": LLAMA3_ROPE}),
    "dense_tied": ("tiny_dense", {"tie_word_embeddings": True}),
    "tiny_qwen3": ("tiny_qwen3", GROUPED),
    "qwen3_tied": ("tiny_qwen3", {"tie_word_embeddings": True}),
    "tiny_qwen3_moe": ("tiny_qwen3_moe", GROUPED),
    "qwen3_moe_not_normalised": ("tiny_qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe_one_expert_of_8": (
        "tiny_qwen3_moe",
        {"norm_topk_prob": False, "num_experts_per_tok": 1, "num_local_experts": 8},
    ),
    "qwen3_moe_dense_layers": (
        "tiny_qwen3_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 6},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Megatron world of this process for all variants."""
    with world_of_one(run_config(tmp_path_factory.mktemp("world"))):
        yield


def random_tokens(rows: int, positions: int) -> Tensor:
    # Not the pad token: transformers keeps its embedding out of the gradient.
    return torch.randint(1, 32, (rows, positions), generator=torch.Generator().manual_seed(3))


def forward(policy: Policy, tokens_BS: Tensor, bounds: tuple[int, ...]) -> Tensor:
    rows = Rows.of_bounds(bounds, 0, 1, tokens_BS.device)
    positions_BS = rows.positions_s.expand_as(tokens_BS)
    logits: Tensor = policy.modules[0](tokens_BS, positions_BS, None, packed_seq_params=rows)
    return logits


def check_same(policy: Policy, reference: Any, ours: Tensor, theirs: Tensor) -> None:
    """Compare logits, and the gradients of all parameters of a function of them."""
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    reference.zero_grad()
    assert theirs.abs().max() > 0.5  # logits that differ from each other
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.log_softmax(ours, -1)[..., 0].sum().backward()
    torch.log_softmax(theirs, -1)[..., 0].sum().backward()
    own = gradients(policy)
    trained = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    other = revert_weight_conversion(reference, trained)
    assert own.keys() == other.keys()
    largest = max(float(g.abs().max()) for g in other.values())
    for name, gradient in other.items():
        # Sums of this size were rounded on the way to even the smallest gradient.
        atol = 1e-5 * max(float(gradient.abs().max()), 1e-2 * largest)
        torch.testing.assert_close(own[name], gradient, atol=atol, rtol=1e-4, msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_gradients_and_files_equal_those_of_transformers(
    variant: str, tmp_path: Path
) -> None:
    name, changes = VARIANTS[variant]
    directory = write_model(tmp_path / "hf", name, **changes)
    policy = Policy(run_config(directory), directory)
    reference = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    check_export(policy, directory, tmp_path / "out")

    tokens_BS = random_tokens(3, 40)
    ours = forward(policy, tokens_BS, (0, 40))
    check_same(policy, reference, ours, reference(tokens_BS).logits)

    bounds = (0, 33, 40, 63)  # packed
    tokens_1S = random_tokens(1, 63)
    ours = forward(policy, tokens_1S, bounds)
    each = [reference(tokens_1S[:, a:b]).logits for a, b in itertools.pairwise(bounds)]
    check_same(policy, reference, ours, torch.cat(each, dim=1))


def check_export(policy: Policy, directory: Path, out: Path) -> None:
    """Compare the exported tensors with the loaded file, also through a sharded directory."""
    loaded = load_file(directory / "model.safetensors")
    stream = dict(export(policy))
    assert stream.keys() == loaded.keys()
    assert all(torch.equal(stream[name], loaded[name]) for name in loaded)

    # Every tensor in a file of its own: the sharded format, which transformers reads as well.
    written = hf_checkpoint.write(out, directory, export(policy), max_shard_bytes=1)
    again = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    source = SafetensorsDirectory(written)
    assert source.tensors.keys() == loaded.keys()
    assert all(torch.equal(source.read(n), loaded[n]) for n in loaded)
    tokens = torch.arange(3, 20)[None]
    assert torch.isfinite(again(tokens).logits).all()
    # It is read back, file by file, as it was.
    policy.load_huggingface(written)
    assert all(torch.equal(t, loaded[name]) for name, t in export(policy))


def test_the_text_part_of_a_multimodal_checkpoint_is_trained_and_the_rest_carried_through(
    tmp_path: Path,
) -> None:
    directory = write_multimodal(tmp_path / "hf", **SHORT)
    loaded = load_file(directory / "model.safetensors")
    vision = {n for n in loaded if not n.startswith("language_model.")}
    config = run_config(directory)
    policy = Policy(config, directory)
    reference = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    assert policy.architecture.shapes() == {
        n: tuple(t.shape) for n, t in loaded.items() if n not in vision
    }
    tokens_BS = random_tokens(2, 40)
    ours = forward(policy, tokens_BS, (0, 40))
    check_same(policy, reference, ours, reference(input_ids=tokens_BS).logits)

    assert vision
    assert set(policy.architecture.passthrough(loaded)) == vision
    with torch.no_grad():
        for p in policy.parameters.values():
            p.mul_(2)
    save_huggingface(policy, tmp_path / "out", directory)
    source = SafetensorsDirectory(tmp_path / "out")
    assert source.tensors.keys() == loaded.keys()
    for name, tensor in loaded.items():
        assert torch.equal(source.read(name), tensor if name in vision else 2 * tensor), name


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "hf", "tiny_dense")
    original = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").unlink()
    config = run_config(directory)
    with pytest.raises(CheckpointError, match="incomplete"):
        Policy(config, directory)
    (directory / "model.safetensors").write_bytes(original)
    policy = Policy(config, directory)
    scout = write_model(tmp_path / "scout", "tiny_scout")
    with pytest.raises(ValueError, match="does not hold the tensors of its config.json"):
        policy.load_huggingface(scout)
    wide = write_model(tmp_path / "wide", "tiny_dense", intermediate_size=256)
    with pytest.raises(ValueError, match=r"layers.0.mlp.gate_proj.* is \[256, 64\]"):
        policy.load_huggingface(wide)
    sharded = hf_checkpoint.write(tmp_path / "out", directory, export(policy), 1)
    index = sharded / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("lm_head.weight", "head.weight"))
    with pytest.raises(ValueError, match=r"disagree on head.weight, lm_head.weight"):
        policy.load_huggingface(sharded)
