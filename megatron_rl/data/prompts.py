"""A prompt set as the orchestrator reads it: tokenized training prompts and held-out prompts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_rl.config import ConfigError, DataSetTask, RunConfig
from megatron_rl.data import question as questions
from megatron_rl.data.prompt_format import TINY, PromptFormat
from megatron_rl.data.question import Question
from megatron_rl.data.splits import load_split

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. Example: `Prompt(id=3, text="<bos>2+3=?<think>", ..., gold="5")`."""

    id: int
    """Index in its list (training or held-out), over all tasks."""
    text: str
    token_ids: list[int]
    gold: str
    """Right answer."""
    task: str = "arithmetic"
    """Name of its task."""
    kind: str = "exact"
    """Verifier that judges its completions."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What the verifier wants beside it."""
    difficulty: str = ""
    """Level, if there is one."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Training prompts, held-out prompts that no stage trains on, and a fingerprint of both.

    The prompts of a task stand together, tasks in the order of the configuration.
    """

    train: list[Prompt]
    heldout: list[Prompt]
    fingerprint: str
    """Hash of all texts and answers: a resumed run refuses another data set."""

    @property
    def sizes(self) -> dict[str, int]:
        """Training prompts of each task."""
        return dict(Counter(p.task for p in self.train))

    @property
    def verifiers(self) -> list[str]:
        """Verifiers that the prompts want."""
        return sorted({p.kind for p in (*self.train, *self.heldout)})


def load_prompts(config: RunConfig, tokenizer: Tokenizer, form: PromptFormat = TINY) -> PromptSet:
    """The prompt set of a run.

    Args:
        config: tasks, seeds and `generation.max_prompt_tokens`.
        tokenizer: the model's.
        form: from a question to the text of the prompt.

    Raises:
        ConfigError: a prompt longer than `generation.max_prompt_tokens`, characters that the
            tokenizer doesn't know, or fewer prompts than one step takes.
        DataError: a data set cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    train: list[Prompt] = []
    heldout: list[Prompt] = []
    splits = {name: load_split(t, config.seed_of(name)) for name, t in config.tasks.items()}
    # What one task holds out, another may ask.
    apart = {q.prompt for _, part in splits.values() for q in part}
    for name, (pool, held_out) in splits.items():
        pool = [q for q in pool if q.prompt not in apart]
        for found, part in ((train, pool), (heldout, held_out)):
            digest.update(f"{name}\0{questions.fingerprint(part)}\0".encode())
            found.extend(_prompts(config, name, part, tokenizer, form, first=len(found)))
    if len(train) < config.schedule.prompts_per_step:
        raise ConfigError(
            f"schedule.prompts_per_step is {config.schedule.prompts_per_step}: the tasks have"
            f" {len(train)} training prompts"
        )
    return PromptSet(train, heldout, digest.hexdigest())


def _prompts(
    config: RunConfig,
    name: str,
    found: list[Question],
    tokenizer: Tokenizer,
    form: PromptFormat,
    first: int,
) -> Iterator[Prompt]:
    task, longest = config.tasks[name], config.generation.max_prompt_tokens
    dropping = isinstance(task, DataSetTask) and task.drop_long_prompts
    unknown = getattr(tokenizer.model, "unk_token", None)
    unknown_id = tokenizer.token_to_id(unknown) if unknown else None
    index = first
    for question in found:
        text = form(question.prompt)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if unknown_id is not None and unknown_id in ids:
            raise ConfigError(
                f"{config.task_key(name)}: question {question.id} has characters that the model's"
                f" tokenizer does not know: {text[:80]!r}; take another task, or another model"
            )
        if len(ids) > longest:
            if dropping:
                continue
            raise ConfigError(
                f"generation.max_prompt_tokens is {longest}: question {question.id} of"
                f" {config.task_key(name)} has {len(ids)} tokens"
                + (
                    f"; raise it, or set {config.task_key(name)}.drop_long_prompts"
                    if isinstance(task, DataSetTask)
                    else ""
                )
            )
        meta = question.meta
        if question.kind == "exact":
            meta = {"eos": form.eos, **meta}
        yield Prompt(
            index, text, ids, question.gold, name, question.kind, meta, question.difficulty
        )
        index += 1
