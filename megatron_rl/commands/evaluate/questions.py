"""Evaluation sets as tokenized prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config import RunConfig
from megatron_rl.data import Prompt, load_prompts
from megatron_rl.data.published import load_benchmark
from megatron_rl.data.prompt_format import PromptFormat
from megatron_rl.data.question import DataError, Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RUN = "run"
"""Name of the run's own held-out set."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Prompts of one set. Example: `EvaluationSet("aime2024", prompts, ids)`."""

    name: str
    prompts: list[Prompt]
    ids: list[str]
    """Name of each question in its data set."""


def load_sets(
    wanted: list[str],
    config: RunConfig,
    tokenizer: Tokenizer,
    form: PromptFormat,
    *,
    kind: str,
    limit: int | None,
) -> list[EvaluationSet]:
    """The sets in the order wanted; the run's held-out set is one set for each of its tasks.

    Args:
        wanted: `run`, a name of `data.benchmarks`, `name=path` of a local copy, or a .jsonl file.
        config: the run's.
        tokenizer: the model's.
        form: from a question to the text of the prompt.
        kind: verifier of a JSONL file's rows that name none.
        limit: first so many questions of each set.

    Raises:
        DataError: no such set, or one that cannot be read.
    """
    out: list[EvaluationSet] = []
    for name in wanted:
        if name == RUN:
            out += _heldout(config, tokenizer, form)
        else:
            out.append(_named(name, tokenizer, form, kind))
    names = [s.name for s in out]
    if len(set(names)) < len(names):
        raise DataError(f"evaluation sets {', '.join(names)}: one of them is named twice")
    return [EvaluationSet(s.name, s.prompts[:limit], s.ids[:limit]) for s in out]


def _heldout(config: RunConfig, tokenizer: Tokenizer, form: PromptFormat) -> list[EvaluationSet]:
    heldout = load_prompts(config, tokenizer, form).heldout
    tasks = list(dict.fromkeys(p.task for p in heldout))
    out = []
    for task in tasks:
        own = [p for p in heldout if p.task == task]
        name = RUN if len(tasks) == 1 else f"{RUN}/{task}"
        out.append(EvaluationSet(name, own, [str(p.id) for p in own]))
    return out


def _named(name: str, tokenizer: Tokenizer, form: PromptFormat, kind: str) -> EvaluationSet:
    benchmark, _, local = name.partition("=")
    questions = load_benchmark(benchmark, local or None, kind=kind)
    label = Path(benchmark).stem if benchmark.endswith(".jsonl") else benchmark
    prompts = [_prompt(i, q, label, tokenizer, form) for i, q in enumerate(questions)]
    return EvaluationSet(label, prompts, [q.id for q in questions])


def _prompt(
    index: int, question: Question, name: str, tokenizer: Tokenizer, form: PromptFormat
) -> Prompt:
    text = form(question.prompt)
    meta = {"eos": form.eos, **question.meta} if question.kind == "exact" else question.meta
    return Prompt(
        id=index,
        text=text,
        token_ids=tokenizer.encode(text, add_special_tokens=False).ids,
        gold=question.gold,
        task=name,
        kind=question.kind,
        meta=meta,
        difficulty=question.difficulty,
    )
