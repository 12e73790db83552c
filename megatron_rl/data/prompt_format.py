"""From a question to the text that the model reads; its last token opens thinking."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Markers around a question, or the model's chat template.

    Example: `PromptFormat()("2+3=?")` is `<bos>2+3=?<think>`.
    """

    bos: str = "<bos>"
    """Marker that opens a sequence; empty if the model has none."""
    eos: str = "<eos>"
    """Marker that ends a completion."""
    think_start: str = "<think>"
    """Marker that opens thinking, where the chat template does not; may be empty."""
    chat: Callable[[str], str] | None = None
    """A question as the user's turn, with the assistant's opened."""

    def __call__(self, question: str) -> str:
        """The text of a prompt."""
        text = self.bos + question if self.chat is None else self.chat(question)
        opened = text.rstrip().endswith(self.think_start)
        return text if opened else text + self.think_start


TINY = PromptFormat()
"""The format of the tiny models' vocabulary."""


def read_format(directory: Path, think_start: str) -> PromptFormat:
    """The format of a Hugging Face model: its chat template, where it has one."""
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    templates = (directory / "chat_template.jinja", directory / "chat_template.json")
    has_chat = bool(settings.get("chat_template")) or any(t.exists() for t in templates)
    return PromptFormat(
        bos=_token(settings.get("bos_token")),
        eos=_token(settings.get("eos_token")),
        think_start=think_start,
        chat=_chat(directory) if has_chat else None,
    )


def _token(value: Any) -> str:
    """A special token: a string, a mapping with `content`, or none."""
    return str(value["content"]) if isinstance(value, dict) else str(value or "")


def _chat(directory: Path) -> Callable[[str], str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory))

    def chat(question: str) -> str:
        turn = [{"role": "user", "content": question}]
        return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))

    return chat
