"""A prompt set as the orchestrator reads it: tokenized training prompts and held-out prompts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.data import arithmetic

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. Example: `Prompt(id=3, text="<bos>2+3=?<think>", ..., answer="5")`."""

    id: int
    """Index in its list (training or held-out)."""
    text: str
    token_ids: list[int]
    answer: str
    """Gold answer."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Training prompts, held-out prompts that no stage trains on, and a fingerprint of both."""

    train: list[Prompt]
    heldout: list[Prompt]
    fingerprint: str
    """Hash of all texts and answers: a resumed run refuses another data set."""


def load_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptSet:
    """The prompt set of a run.

    Raises:
        ConfigError: a prompt longer than `generation.max_prompt_tokens`.
    """
    split = arithmetic.make_split(config.task, config.task_seed)
    digest = hashlib.blake2b(digest_size=16)

    def prompts(problems: list[arithmetic.Problem]) -> list[Prompt]:
        out = []
        for i, problem in enumerate(problems):
            text, answer = arithmetic.prompt_text(problem), str(problem.answer)
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) > config.generation.max_prompt_tokens:
                raise ConfigError(
                    f"generation.max_prompt_tokens is {config.generation.max_prompt_tokens}:"
                    f" prompt {i} of task {config.task.name} has {len(ids)} tokens"
                )
            digest.update(f"{text}\0{answer}\0".encode())
            out.append(Prompt(i, text, ids, answer))
        return out

    return PromptSet(prompts(split.train), prompts(split.heldout), digest.hexdigest())
