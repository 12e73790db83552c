"""The 25-token vocabulary of the tiny models, as a Hugging Face tokenizer directory.

Characters are tokens; markers of the chat format and `\\boxed{` are single tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIAL = (PAD, BOS, EOS, "<think>", "</think>")
TOKENS = (*SPECIAL, "\\boxed{", "}", *"0123456789+-*=;?()")


def save_tiny_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into a model directory."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(TOKENS)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken("\\boxed{", normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": PAD,
        "additional_special_tokens": ["<think>", "</think>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
