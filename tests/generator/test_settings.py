"""vLLM's arguments for a configuration; a misfit is refused before vLLM starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config import RunConfig
from megatron_rl.models import architecture
from megatron_rl.models.safetensors_directory import read_config
from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.number_format import WireFormat
from tests.generator import tiny_models
from tests.generator.conftest import needs_vllm, run_config
from tests.weights.versions import as_sent

pytestmark = needs_vllm


def engine_args(*arguments: Any) -> Any:
    from megatron_rl.generator import vllm_args

    return vllm_args.engine_args(*arguments)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_models.save("llama4", 0, tmp_path_factory.mktemp("settings"))


def with_precision(config, **precision: str):
    return config.model_copy(
        update={"precision": config.precision.model_copy(update=precision)}, deep=True
    )


def test_the_head_is_fp32_where_parameters_are_bf16(model_dir):
    config = run_config(model_dir)
    assert "head_dtype" not in engine_args(config, 0, str(model_dir)).hf_overrides
    bf16 = engine_args(with_precision(config, params="bf16"), 0, str(model_dir))
    assert bf16.dtype == "bfloat16"
    assert bf16.hf_overrides["head_dtype"] == "float32"
    tf32 = engine_args(with_precision(config, params="bf16", logits="tf32"), 0, str(model_dir))
    assert tf32.hf_overrides["head_dtype"] == "float32"
    plain = engine_args(with_precision(config, params="bf16", logits="bf16"), 0, str(model_dir))
    assert "head_dtype" not in plain.hf_overrides
    rounded = engine_args(with_precision(config, params="fp32", logits="bf16"), 0, str(model_dir))
    assert rounded.hf_overrides["head_dtype"] == "bfloat16"


def test_the_head_may_be_fp32_on_one_side_only(model_dir):
    sides = {("fp32", "bf16"): None, ("bf16", "fp32"): "float32", ("tf32", "fp32"): "float32"}
    for (trainer, generator), head in sides.items():
        precision = {"params": "bf16", "logits": trainer, "generator_logits": generator}
        config = with_precision(run_config(model_dir), **precision)
        assert engine_args(config, 0, str(model_dir)).hf_overrides.get("head_dtype") == head
        assert config.precision.logits == trainer  # of the trainer's `HeadPass`
    for wrong in ({"generator_logits": "tf32"}, {"generator_logits": "fp16"}):
        with pytest.raises(ValueError, match=r"(?s)precision.generator_logits.*'fp32' or 'bf16'"):
            RunConfig(precision=wrong)


def test_log_probs_are_those_of_the_sampling_temperature(model_dir):
    def mode(temperature: float) -> str:
        config = run_config(model_dir, temperature=temperature)
        return engine_args(config, 0, str(model_dir)).logprobs_mode

    assert mode(1.0) == "raw_logprobs"
    assert mode(0.7) == "processed_logprobs"


def test_the_longest_sequence_fits_with_one_token_to_spare(model_dir):
    from megatron_rl.generator.vllm_args import BLOCK_TOKENS

    for prompt_tokens in range(100, 140):
        config = run_config(model_dir, max_prompt_tokens=prompt_tokens)
        length = engine_args(config, 0, str(model_dir)).max_model_len
        assert config.sequence_tokens < length <= config.sequence_tokens + BLOCK_TOKENS
        assert length % BLOCK_TOKENS == 0


def test_every_engine_has_its_own_seed(model_dir):
    config = run_config(model_dir)
    assert [engine_args(config, i, str(model_dir)).seed for i in (0, 1)] == [1234, 1235]


def test_llama_4_keeps_its_chunks_and_query_scale_where_they_matter(model_dir, tmp_path):
    short = engine_args(run_config(model_dir), 0, str(model_dir))
    assert short.hf_overrides["attention_chunk_size"] is None  # chunks of 8192, sequences of 300
    settings = json.loads((model_dir / "config.json").read_text())
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).symlink_to(model_dir / name)
    settings |= {"attention_chunk_size": 64, "attn_temperature_tuning": True}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    long = engine_args(run_config(tmp_path), 0, str(tmp_path))
    assert "attention_chunk_size" not in (long.hf_overrides or {})
    assert long.override_generation_config == {"attn_temperature_tuning": True}


def test_the_text_part_of_a_multimodal_checkpoint_has_the_settings_of_a_text_model(
    model_dir, tmp_path
):
    text = json.loads((model_dir / "config.json").read_text())
    whole = {"model_type": "llama4", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = with_precision(run_config(tmp_path), params="bf16")
    args = engine_args(config, 0, str(tmp_path))
    expected = {"head_dtype": "float32", "attention_chunk_size": None}
    assert args.hf_overrides == {**expected, "text_config": expected}
    assert args.language_model_only
    assert not engine_args(config, 0, str(model_dir)).language_model_only


def test_a_phrase_that_is_not_what_it_seems_as_tokens_is_refused(model_dir):
    from megatron_rl.generator.vllm_args import interruption

    tokenizer = tiny_models.tokenizer()
    config = run_config(model_dir)
    rule = interruption(config, tokenizer)
    assert rule is not None
    assert tokenizer.convert_ids_to_tokens(rule.phrase) == ["(", "a", "b", "c", ")", "</think>"]
    several = run_config(model_dir, think_end="ab", interruption_phrase="(ab")
    rule = interruption(several, tokenizer)
    assert rule is not None
    assert rule.end([*rule.phrase, *rule.phrase]) == len(rule.phrase)
    unknown = run_config(model_dir, think_end="\u00e9", interruption_phrase="(\u00e9")
    with pytest.raises(ValueError, match=r"as tokens of this model it is .*another phrase"):
        interruption(unknown, tokenizer)


def test_what_a_version_must_hold_is_known_without_the_weights(model_dir, tmp_path):
    tensors = as_sent(tiny_models.checkpoint(model_dir))
    expected = {n: tuple(t.shape) for n, t in tensors.items()}
    assert any("experts.3.gate_proj" in name for name in expected)
    for path in model_dir.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).symlink_to(path)
    config = run_config(tmp_path)
    infos = WireFormat.of(config).expected(architecture(read_config(tmp_path)).shapes())
    assert {name: tuple(info.shape) for name, info in infos.items()} == expected
    assert engine_args(config, 0, str(tmp_path)).load_format == "dummy"
    assert engine_args(run_config(model_dir), 0, str(model_dir)).load_format != "dummy"


def with_fp8(directory: Path):
    tree = run_config(directory).model_dump(mode="json")
    tree["weights"] |= {"dtype": "bf16", "quantization": "fp8"}
    return RunConfig.model_validate(tree)


def test_fp8_tells_vllm_the_blocks_and_what_stays_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    directory = tiny_models.save("qwen3_moe_fp8", 0, tmp_path)
    args = engine_args(with_fp8(directory), 0, str(directory))
    assert args.load_format == "dummy"
    assert args.dtype == "bfloat16"
    quantization = args.hf_overrides["quantization_config"]
    assert quantization["weight_block_size"] == [128, 128]
    assert set(quantization["modules_to_not_convert"]) == {
        "model.embed_tokens",
        "lm_head",
        *(f"model.layers.{i}.mlp.gate" for i in range(3)),
    }


def test_fp8_is_refused_where_the_engine_cannot_take_it(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="'fp8': vLLM's CPU build has no FP8 experts for Llama 4"):
        engine_args(with_fp8(model_dir), 0, str(model_dir))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    directory = tiny_models.save("qwen3", 0, tmp_path)
    with pytest.raises(ValueError, match=r"weights.quantization is 'fp8': .* CPUs with AMX"):
        engine_args(with_fp8(directory), 0, str(directory))
    with pytest.raises(WeightsError, match=r"q_proj.weight is 64 x 64: FP8 with block scales"):
        WireFormat.of(with_fp8(directory)).expected(architecture(read_config(directory)).shapes())
