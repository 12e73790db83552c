"""The tiny models are what transformers would have written, without transformers or Megatron."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.models import architecture, tiny


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_created_model_is_what_transformers_saves(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    directory = tiny.create(name, tmp_path / "model", seed=7)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    ours = load_file(directory / "model.safetensors")
    theirs = load_file(tmp_path / "saved" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)

    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    saved.pop("transformers_version")
    assert json.loads((directory / "config.json").read_text()) == saved
    assert AutoConfig.from_pretrained(directory).vocab_size == tiny.VOCABULARY
    generation = GenerationConfig.from_pretrained(directory)
    found = (generation.pad_token_id, generation.bos_token_id, generation.eos_token_id)
    assert found == (tiny.PAD, tiny.BOS, tiny.EOS)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_the_mapping_covers_every_tensor_once(name: str, tmp_path: Path) -> None:
    tensors = load_file(tiny.create(name, tmp_path) / "model.safetensors")
    weights = architecture(tiny.CONFIGS[name]).weights()
    slots = [(hf, w.index) for w in weights for hf in w.hf]
    assert len(set(slots)) == len(slots)
    assert {hf for hf, _ in slots} == tensors.keys()
    fused = {hf for hf, index in slots if index is not None}
    for hf in fused:
        assert sorted(i for n, i in slots if n == hf) == list(range(len(tensors[hf])))


def test_the_seed_decides_the_weights_and_the_tokenizer_saver_is_called(tmp_path: Path) -> None:
    called: list[Path] = []
    one = tiny.create("tiny_dense", tmp_path / "1", called.append, seed=1)
    same = tiny.create("tiny_dense", tmp_path / "2", seed=1)
    other = tiny.create("tiny_dense", tmp_path / "3", seed=2)
    a, b, c = (load_file(d / "model.safetensors")["lm_head.weight"] for d in (one, same, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert called == [one]
    with pytest.raises(ValueError, match="tiny_dense, tiny_qwen3"):
        tiny.create("tiny_gpt", tmp_path / "4")


def test_creating_a_model_imports_neither_megatron_nor_transformers() -> None:
    code = (
        "import sys; from megatron_rl.models import tiny, architecture;"
        "architecture(tiny.CONFIGS['tiny_scout']).weights();"
        "bad = {'megatron', 'transformers', 'vllm'} & set(sys.modules); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_is_not_implemented_is_refused_by_name() -> None:
    scout, dense = tiny.CONFIGS["tiny_scout"], tiny.CONFIGS["tiny_dense"]
    qwen, qwen_moe = tiny.CONFIGS["tiny_qwen3"], tiny.CONFIGS["tiny_qwen3_moe"]
    for config, what in (
        ({**dense, "model_type": "gpt2"}, "model_type 'gpt2'"),
        ({**dense, "attention_bias": True}, "attention_bias = True"),
        ({**dense, "hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({**scout, "num_experts_per_tok": 2}, "num_experts_per_tok = 2"),
        ({**scout, "no_rope_layers": [1, 0]}, "2 no_rope_layers for 3 layers"),
        ({"model_type": "llama4", "vision_config": {}}, "no text_config"),
        ({**qwen, "use_sliding_window": True}, "use_sliding_window = True"),
        ({**qwen_moe, "num_experts_per_tok": 5}, "5 of 4 experts"),
        ({**qwen_moe, "num_experts_per_tok": 1}, "norm_topk_prob = true"),
    ):
        with pytest.raises(ValueError, match=what):
            architecture(config)
    yarn = {**dense, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}
    with pytest.raises(ValueError, match="rope_type 'yarn'"):
        architecture(yarn).inverse_frequencies()
