"""The questions of each kind of task, split into a training pool and held-out ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from megatron_rl.config import (
    ArithmeticTask,
    DataSetTask,
    HuggingFaceTask,
    JsonlTask,
    ReasoningTask,
    RunConfig,
    Task,
)
from megatron_rl.data import arithmetic
from megatron_rl.data.benchmarks import load_benchmark
from megatron_rl.data.hf_dataset import read_huggingface
from megatron_rl.data.jsonl import Fields, read_jsonl
from megatron_rl.data.prompt_format import TINY
from megatron_rl.data.question import DataError, Question
from megatron_rl.data.reasoning import make_reasoning

Split = tuple[list[Question], list[Question]]
"""(training pool, held-out questions)."""


def load_split(task: Task, seed: int) -> Split:
    """The same questions for the same task and seed; no held-out one is in the training pool.

    Raises:
        DataError: a data set that cannot be read or is too small; with the remedy.
    """
    match task:
        case ArithmeticTask():
            return _exact(*arithmetic.make_split(task, seed))
        case ReasoningTask():
            count = task.train_prompts + task.heldout_prompts
            made = make_reasoning(
                task.dataset, count=count, seed=seed, level=task.level, options=task.options
            )
            return made[: task.train_prompts], made[task.train_prompts :]
        case DataSetTask():
            return _data_set(task, seed)
    raise DataError(f"a task of kind {type(task).__name__} has no questions")


def demonstrations(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Noisy demonstrations of the tasks as (prompt, completion), each task by its weight.

    Raises:
        DataError: a task without demonstrations.
    """
    s, thinking = config.sft, config.generation.thinking_budget_tokens[1]
    total = sum(task.weight for task in config.tasks.values())
    heldout: set[str] = set()
    parts = []
    for name, task in config.tasks.items():
        if not isinstance(task, ArithmeticTask):
            raise DataError(
                f"{config.task_key(name)}.kind is {task.kind!r}: there are demonstrations of"
                " arithmetic alone; give a start_checkpoint"
            )
        count, seed = round(s.prompts * task.weight / total), config.seed_of(name)
        parts.append(
            arithmetic.demonstrations(task, seed, count, s.demonstrations_per_prompt, thinking)
        )
        heldout |= {TINY(problem.question) for problem in arithmetic.make_split(task, seed)[1]}
    # What one task holds out, another may ask.
    return (pair for part in parts for pair in part if pair[0] not in heldout)


def _exact(train: Sequence[arithmetic.Problem], heldout: Sequence[arithmetic.Problem]) -> Split:
    def questions(problems: Sequence[arithmetic.Problem]) -> list[Question]:
        return [
            Question(id=str(i), kind="exact", prompt=p.question, gold=str(p.answer))
            for i, p in enumerate(problems)
        ]

    return questions(train), questions(heldout)


def _data_set(task: DataSetTask, seed: int) -> Split:
    fields = Fields(prompt=task.prompt_field, gold=task.answer_field, meta=task.meta_fields)
    found: list[Question]
    if isinstance(task, JsonlTask):
        name = str(task.path)
        found = read_jsonl(task.path, kind=task.verifier, fields=fields, template=task.template)
    elif isinstance(task, HuggingFaceTask):
        name = task.source
        found = read_huggingface(
            task.source,
            split=task.split,
            subset=task.subset,
            revision=task.revision,
            kind=task.verifier,
            fields=fields,
            template=task.template,
        )
    else:
        raise DataError(f"a data set of kind {type(task).__name__} has no reader")
    random.Random(f"split {seed}").shuffle(found)
    if task.heldout is None:
        heldout = found[: task.heldout_prompts]
    elif task.heldout.endswith(".jsonl"):
        heldout = read_jsonl(
            task.heldout, kind=task.verifier, fields=fields, template=task.template
        )[: task.heldout_prompts]
    else:
        heldout = load_benchmark(task.heldout)[: task.heldout_prompts]
    apart = {q.prompt for q in heldout}
    train = [q for q in found if q.prompt not in apart][: task.train_prompts]
    if not train:
        raise DataError(
            f"{name}: {len(found)} questions, of which {len(heldout)} are held out, leave none to"
            " train on; lower heldout_prompts, or give a set of its own as heldout"
        )
    return train, heldout
