"""Material of the supervised stage's tests: a byte tokenizer with a chat template, rows, models."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from megatron_rl.config import RunConfig
from tests.trainer.cases import run_config, write_model

SPECIAL = ("<pad>", "<bos>", "<eos>", "<system>", "<user>", "<assistant>")
VOCABULARY = len(SPECIAL) + 256
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_byte_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def conversations(count: int = 24) -> list[list[dict[str, str]]]:
    """Return conversations of one to three turns before the last, 15 to 60 tokens long."""
    rng = random.Random(3)

    def text(low: int, high: int) -> str:
        return "".join(rng.choices("abcdef éß+", k=rng.randint(low, high)))

    out = []
    for i in range(count):
        turns = [{"role": "user", "content": f"{i}:{text(3, 12)}"}]
        if i % 3 == 1:
            turns.insert(0, {"role": "system", "content": text(2, 5)})
        if i % 3 == 2:
            turns += [
                {"role": "assistant", "content": text(2, 8)},
                {"role": "user", "content": text(2, 8)},
            ]
        out.append([*turns, {"role": "assistant", "content": text(4, 20)}])
    return out


def as_row(turns: list[dict[str, str]]) -> dict[str, Any]:
    """Return a row in the simplest form that holds the conversation."""
    if len(turns) == 2:
        return {"question": turns[0]["content"], "response": turns[1]["content"]}
    return {"messages": turns}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sft_config(model: Path, source: Path, ranks: int = 1, **overrides: Any) -> RunConfig:
    options = {
        "sft__source": str(source),
        "sft__steps": 5,
        "sft__tokens_per_step": 280,
        "sft__warmup_steps": 2,
        "sft__learning_rate": 3e-4,  # Adam makes steps of this size of rounding errors
        "generation__think_start": "",
        "checkpoint__every_steps": 2,
        "checkpoint__keep": 9,
        "metrics__terminal": "off",
        **overrides,
    }
    return run_config(model, ranks, **options)


MODELS: dict[str, dict[str, Any]] = {
    "tiny_dense": {"num_hidden_layers": 4, "tie_word_embeddings": True},
    "tiny_scout": {},
}


def write_models(folder: Path) -> None:
    """Write each model as transformers does, and `<name>_tuned` as other tools leave it."""
    for name, changes in MODELS.items():
        directory = write_model(folder / name, name, 0.2, vocab_size=VOCABULARY, **changes)
        save_byte_tokenizer(directory)
        shutil.copytree(directory, tuned := folder / f"{name}_tuned")
        tensors = load_file(directory / "model.safetensors")
        rotary = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": tensors["model.norm.weight"]
                  for i in range(2)}  # fmt: skip
        tied = {} if "lm_head.weight" in tensors else {
            "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}  # fmt: skip
        extra = {key: value.clone() for key, value in rotary.items()}
        save_file(tensors | extra | tied, tuned / "model.safetensors", metadata={"format": "pt"})
