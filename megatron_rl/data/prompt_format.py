r"""From a question to the text that the model reads; its last token opens thinking.

A Hugging Face model has its chat template. The tiny models have a vocabulary of 25 tokens: single
characters, the markers, and `\boxed{`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_rl.data.question import DataError

Turn = dict[str, Any]  # `role`, `content`, and what else a chat template knows
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIAL = (PAD, BOS, EOS, "<think>", "</think>")
TOKENS = (*SPECIAL, "\\boxed{", "}", *"0123456789+-*=;?()")  # vocabulary of the tiny models
CALL, CALL_END = '<tool_call>{"name": "lookup", "arguments": {"key": "', '"}}</tool_call>'
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"
TOOL_TOKENS = (CALL, CALL_END, RESPONSE, RESPONSE_END)
"""Tokens that the vocabulary has in addition in a run with tools: around the key of `data.lookup`,
in the form that vLLM calls `hermes`, and around what the tool returns."""
TOOL_TEMPLATE = """\
{{- '<bos>' }}
{%- for turn in messages %}
    {%- if turn.role == 'tool' %}
        {{- '<tool_response>' ~ turn.content ~ '</tool_response>' }}
    {%- else %}
        {{- turn.content or '' }}
        {%- for call in turn.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<eos>' if turn.role == 'assistant' }}
    {%- endif %}
{%- endfor %}
"""
"""Chat template of the tiny models in a run with tools; they know their tool without being told."""


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Markers around a question, or the model's chat template.

    Example: `PromptFormat()("2+3=?")` is `<bos>2+3=?<think>`.
    """

    bos: str = BOS  # marker that opens a sequence; empty if the model has none
    eos: str = EOS  # marker that ends a completion
    think_start: str = "<think>"  # opens thinking, unless the chat template has; may be empty
    chat: Callable[[list[Turn]], str] | None = None  # of the turns before the assistant's

    def __call__(self, question: str | list[Turn]) -> str:
        """Return the text of a prompt: of a question, or of the turns before a response.

        Raises `DataError` for several turns without a chat template.
        """
        turns = [{"role": "user", "content": question}] if isinstance(question, str) else question
        if self.chat is not None:
            text = self.chat(turns)
        elif [turn["role"] for turn in turns] == ["user"]:
            text = self.bos + turns[0]["content"]
        else:
            raise DataError("several turns before the response: the model has no chat template")
        opened = text.rstrip().endswith(self.think_start)
        return text if opened else text + self.think_start

    def completion(self, prompt: str, response: str) -> str:
        """Return what follows the prompt's text: the response to its end.

        The marker that opens thinking is not repeated.
        """
        marked = response.lstrip()
        if self.think_start and marked.startswith(self.think_start):
            space = prompt[len(prompt.rstrip()) :]
            response = marked.removeprefix(self.think_start).removeprefix(space)
        return response if response.endswith(self.eos) else response + self.eos


TINY = PromptFormat()  # the format of the tiny models


def read_format(directory: Path, think_start: str) -> PromptFormat:
    """Read the format of a Hugging Face model: its chat template, if it has one."""
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    templates = (directory / "chat_template.jinja", directory / "chat_template.json")
    has_chat = bool(settings.get("chat_template")) or any(t.exists() for t in templates)
    chat = _chat(directory) if has_chat else None
    bos = "" if has_chat else _opening(directory, settings)
    return PromptFormat(bos, _token(settings.get("eos_token")), think_start, chat)


def _opening(directory: Path, settings: dict[str, Any]) -> str:
    """Return the token that the tokenizer itself puts before a text, or nothing."""
    if (adds := settings.get("add_bos_token")) is not None:
        return _token(settings.get("bos_token")) if adds else ""
    if not (path := directory / "tokenizer.json").exists():
        return ""
    text = Tokenizer.from_file(str(path)).encode("0")
    return text.tokens[0] if text.special_tokens_mask[0] else ""


def _token(value: Any) -> str:
    """Return the text of a special token: a string, a mapping with `content`, or none."""
    return str(value["content"]) if isinstance(value, dict) else str(value or "")


def _chat(directory: Path) -> Callable[[list[Turn]], str]:
    from transformers import AutoTokenizer

    apply = AutoTokenizer.from_pretrained(str(directory)).apply_chat_template
    return partial(apply, tokenize=False, add_generation_prompt=True)


def save_tiny_tokenizer(directory: Path, tools: bool = False) -> None:
    """Write tokenizer.json and tokenizer_config.json of the tiny models into a directory.

    With `tools`, they have `TOOL_TOKENS` too, and a chat template.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    more = TOOL_TOKENS if tools else ()
    vocabulary = {t: i for i, t in enumerate((*TOKENS, *more))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("\\boxed{", *more)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = resources.files(__package__) / "tiny_tokenizer_config.json"
    (directory / "tokenizer_config.json").write_text(settings.read_text())
    if tools:
        (directory / "chat_template.jinja").write_text(TOOL_TEMPLATE)
