"""The transformers implementation is the reference: same logits, same gradients, same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_rl.policy import huggingface
from megatron_rl.policy.model import Policy
from megatron_rl.weights.export import export
from tests.policy.cases import run_config, world_of_one, write_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHORT = {"attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.3}
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
    "dense_grouped_query": ("tiny_dense", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "dense_scaled_rope": ("tiny_dense", {"rope_parameters": LLAMA3_ROPE}),
    "dense_tied": ("tiny_dense", {"tie_word_embeddings": True}),
}


@pytest.fixture(params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """(policy, transformers model, directory) of one variant."""
    name, changes = VARIANTS[request.param]
    directory = write_model(tmp_path / "hf", name, **changes)
    config = run_config(directory)
    with world_of_one(config):
        reference = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        yield Policy(config, directory), reference, directory


def test_logits_and_gradients_equal_those_of_transformers(pair: Any) -> None:
    policy, reference, _ = pair
    # Not the pad token: transformers keeps its embedding out of the gradient.
    tokens_BS = torch.randint(1, 32, (3, 40), generator=torch.Generator().manual_seed(3))
    positions_BS = torch.arange(40).expand_as(tokens_BS)
    ours = policy.module(tokens_BS, positions_BS, None)
    theirs = reference(tokens_BS).logits
    assert theirs.abs().max() > 0.5  # logits that differ from each other
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

    torch.log_softmax(ours, -1)[..., 0].sum().backward()
    torch.log_softmax(theirs, -1)[..., 0].sum().backward()
    own = policy.parameters["embedding.word_embeddings.weight"].main_grad
    other = reference.get_input_embeddings().weight.grad
    torch.testing.assert_close(own, other, atol=1e-5 * float(other.abs().max()), rtol=1e-4)


def test_export_equals_the_file_that_was_loaded(pair: Any, tmp_path: Path) -> None:
    policy, _, directory = pair
    loaded = load_file(directory / "model.safetensors")
    stream = dict(export(policy))
    assert stream.keys() == loaded.keys()
    assert all(torch.equal(stream[name], loaded[name]) for name in loaded)

    # Every tensor in a file of its own: the sharded format, which transformers reads as well.
    written = huggingface.write(tmp_path / "out", directory, export(policy), max_shard_bytes=1)
    again = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    with huggingface.TensorReader(written) as reader:
        assert reader.names() == loaded.keys()
        assert all(torch.equal(reader.get(n), loaded[n]) for n in loaded)
    tokens = torch.arange(3, 20)[None]
    assert torch.isfinite(again(tokens).logits).all()


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "hf", "tiny_dense")
    (directory / "model.safetensors").unlink()
    config = run_config(directory)
    with world_of_one(config):
        with pytest.raises(FileNotFoundError, match="incomplete"):
            Policy(config, directory)
        scout = write_model(tmp_path / "scout", "tiny_scout")
        (scout / "model.safetensors").rename(directory / "model.safetensors")
        with pytest.raises(ValueError, match="does not hold the tensors of its config.json"):
            Policy(config, directory)
