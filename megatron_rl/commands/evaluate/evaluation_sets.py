"""Evaluation sets as tokenized prompts."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from megatron_rl.config import RunConfig
from megatron_rl.data import Prompt, load_prompts
from megatron_rl.data.prompt_format import PromptFormat
from megatron_rl.data.published import load_benchmark
from megatron_rl.data.question import DataError

Sets = dict[str, list[tuple[str, Prompt]]]
"""Name of a set -> (id of the question in its data set, prompt)."""


def load_sets(
    names: list[str],
    config: RunConfig,
    tokenizer: Tokenizer,
    form: PromptFormat,
    *,
    kind: str,
    limit: int | None,
) -> Sets:
    """Load at most `limit` questions of each set; the run's held-out prompts are a set per task.

    A name is `run`, one of `data.published.BENCHMARKS`, `name=path` of a local copy, or a .jsonl
    file, whose rows without a `kind` have the verifier `kind`.

    Raises:
        DataError: no such set, one that cannot be read, or two of one name.
    """
    loaded: list[tuple[str, list[tuple[str, Prompt]]]] = []
    for name in names:
        if name == "run":
            heldout = load_prompts(config, tokenizer, form).heldout
            tasks = list(dict.fromkeys(p.task for p in heldout))
            for task in tasks:
                label = "run" if len(tasks) == 1 else f"run/{task}"
                loaded.append((label, [(str(p.id), p) for p in heldout if p.task == task]))
            continue
        benchmark, _, local = name.partition("=")
        label = Path(benchmark).stem if benchmark.endswith(".jsonl") else benchmark
        prompts: list[tuple[str, Prompt]] = []
        for q in load_benchmark(benchmark, local or None, kind=kind):
            text = form(q.prompt)
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            meta = {"eos": form.eos, **q.meta} if q.kind == "exact" else q.meta
            prompt = Prompt(len(prompts), text, ids, q.gold, label, q.kind, meta, q.difficulty)
            prompts.append((q.id, prompt))
        loaded.append((label, prompts))
    labels = [label for label, _ in loaded]
    if len(set(labels)) < len(labels):
        raise DataError(f"evaluation sets {', '.join(labels)}: one of them is named twice")
    return {label: prompts[:limit] for label, prompts in loaded}
