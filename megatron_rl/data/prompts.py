"""The prompts of a run: questions of each task, split, formatted and tokenized."""

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from megatron_rl.config import (
    ArithmeticTask,
    ConfigError,
    DataSetTask,
    HuggingFaceTask,
    JsonlTask,
    LookupTask,
    ReasoningTask,
    RunConfig,
    Task,
)
from megatron_rl.data import arithmetic, lookup
from megatron_rl.data.overlap import Overlap
from megatron_rl.data.prompt_format import TINY, PromptFormat
from megatron_rl.data.published import load_benchmark
from megatron_rl.data.question import DataError, Question, apply_template, fingerprint
from megatron_rl.data.reasoning import make_reasoning
from megatron_rl.data.tables import Fields, Source, read_questions


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question as the model reads it."""

    id: int  # index in its list (training, or held-out and evaluation sets), over all tasks
    text: str
    token_ids: list[int]
    question: Question
    task: str = "arithmetic"  # name of its task, or of its evaluation set

    @property
    def row(self) -> dict[str, Any]:
        """The start of rollouts of several turns, instead of the text."""
        q = self.question
        messages = [{"role": "user", "content": q.prompt}]
        return {"messages": messages, "gold": q.gold, "meta": q.meta}


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Training prompts, held-out prompts that no stage trains on, and a fingerprint of both.

    The prompts of a task are contiguous; tasks are in the order of the configuration.
    """

    train: list[Prompt]
    heldout: list[Prompt]
    fingerprint: str  # hash of all texts and answers: a resumed run rejects a changed data set
    sets: dict[str, list[Prompt]] = field(default_factory=dict)  # ids continue those of `heldout`
    set_fingerprints: dict[str, str] = field(default_factory=dict)

    @property
    def evaluated(self) -> list[Prompt]:
        """Held-out prompts and those of the evaluation sets, by id."""
        return [*self.heldout, *(p for prompts in self.sets.values() for p in prompts)]

    @property
    def sizes(self) -> dict[str, int]:
        """Number of training prompts of each task."""
        return dict(Counter(p.task for p in self.train))

    @property
    def verifiers(self) -> list[str]:
        """Verifiers of the prompts."""
        return sorted({p.question.kind for p in (*self.train, *self.evaluated)})


def load_prompts(config: RunConfig, tokenizer: Tokenizer, form: PromptFormat = TINY) -> PromptSet:
    """Load the prompt set of a run; `form` formats a question as the text of a prompt.

    Raises:
        ConfigError: a prompt longer than `generation.max_prompt_tokens`, characters that the
            tokenizer does not know, or fewer prompts than one step takes.
        DataError: a data set cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    limit = config.generation.max_prompt_tokens
    unknown_id = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    splits = {name: load_split(t, config.seed_of(name)) for name, t in config.tasks.items()}
    # Never train on a prompt that another task holds out.
    excluded = {q.prompt for _, heldout in splits.values() for q in heldout}
    lists = []  # (key of the prompts, key of the configuration, name, questions, drops long ones)
    for name, (pool, heldout) in splits.items():
        key, task = config.task_key(name), config.tasks[name]
        drops = task.drop_long_prompts if isinstance(task, DataSetTask) else None
        pool = [q for q in pool if q.prompt not in excluded]
        for part, questions in (("train", pool), ("heldout", heldout)):
            if isinstance(task, DataSetTask):
                questions = [apply_template(q, task.template) for q in questions]
            digest.update(f"{name}\0{fingerprint(questions)}\0".encode())
            lists.append((part, key, name, questions, drops))
    for name, questions in _evaluation_sets(config, splits).items():
        key = f"evaluation.sets.{name}"
        lists.append((key, key, name, questions, None))
    prompts: dict[str, list[Prompt]] = {"train": [], "heldout": []}
    for part, key, name, questions, drops in lists:
        others = sum(len(p) for k, p in prompts.items() if k not in (part, "train"))
        into, first_id = prompts.setdefault(part, []), others if part != "train" else 0
        dropped = 0
        for q in questions:
            prompt = make_prompt(q, first_id + len(into), name, tokenizer, form)
            if unknown_id in prompt.token_ids:
                raise ConfigError(
                    f"{key}: question {q.id} has characters that the model's tokenizer does not"
                    f" know: {prompt.text[:80]!r}; take another task, or another model"
                )
            if (size := len(prompt.token_ids)) <= limit:
                into.append(prompt)
            elif not drops:
                remedy = "" if drops is None else f", or set {key}.drop_long_prompts"
                raise ConfigError(
                    f"generation.max_prompt_tokens is {limit}: question {q.id} of {key} has"
                    f" {size} tokens; raise it{remedy}"
                )
            else:
                dropped += 1
        if dropped:
            reason = f"longer than generation.max_prompt_tokens = {limit}"
            count = f"{dropped} of {len(questions)} {part} prompts"
            print(f"{key}: {count} dropped, {reason}", file=sys.stderr)
    step, total = config.schedule.prompts_per_step, len(prompts["train"])
    if total < step:
        problem = f"the tasks have {total} training prompts"
        raise ConfigError(f"schedule.prompts_per_step is {step}: {problem}")
    sets = {name: prompts[key] for _, key, name, *_ in lists if key.startswith("evaluation.")}
    prints = {name: fingerprint(questions) for _, _, name, questions, _ in lists if name in sets}
    return PromptSet(prompts["train"], prompts["heldout"], digest.hexdigest(), sets, prints)


def _evaluation_sets(
    config: RunConfig, splits: dict[str, tuple[list[Question], list[Question]]]
) -> dict[str, list[Question]]:
    """Load `evaluation.sets`; warn of training questions that overlap with theirs."""
    sets = {}
    for name, one in config.evaluation.sets.items():
        plain, overlap = load_benchmark(one.source, kind=one.verifier), Overlap()
        texts = {q.prompt for q in plain}
        for q in plain:
            overlap.add(q.id, q.prompt)
        for task, (pool, _) in splits.items():
            # Generated expressions differ in more than their words.
            by_words = isinstance(config.tasks[task], DataSetTask)
            find = overlap.find if by_words else texts.__contains__
            if same := [q.id for q in pool if find(q.prompt)]:
                print(
                    f"warning: evaluation.sets.{name}: {len(same)} of {len(pool)} training prompts"
                    f" of {config.task_key(task)} overlap with it, the first is {same[0]}; remove"
                    f" them with `megatron-rl data prepare --against {one.source}`",
                    file=sys.stderr,
                )
        sets[name] = [apply_template(q, None) for q in plain]
    return sets


def make_prompt(q: Question, i: int, task: str, tokenizer: Tokenizer, form: PromptFormat) -> Prompt:
    """Format and tokenize a question of a task; `i` is its index in the list of prompts."""
    text = form(q.prompt)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    meta = {"eos": form.eos, **q.meta} if q.kind == "exact" else q.meta
    return Prompt(i, text, ids, replace(q, meta=meta), task)


def load_split(task: Task, seed: int) -> tuple[list[Question], list[Question]]:
    """Load the questions of a task as (training pool, held-out questions), which are disjoint.

    They are without the task's template, and depend on the task and the seed only.

    Raises `DataError`, with the remedy, for a data set that cannot be read or is too small.
    """
    match task:
        case ArithmeticTask():
            train, heldout = arithmetic.make_split(task, seed)
            return arithmetic.questions(task, train), arithmetic.questions(task, heldout)
        case LookupTask():
            return lookup.make_split(task, seed)
        case ReasoningTask():
            count = task.train_prompts + task.heldout_prompts
            questions = make_reasoning(
                task.dataset, count=count, seed=seed, level=task.level, options=task.options
            )
            return questions[: task.train_prompts], questions[task.train_prompts :]
        case JsonlTask():
            return _split_data_set(task, seed, Source(task.path))
        case HuggingFaceTask():
            source = Source(task.source, task.subset, task.split, task.revision)
            return _split_data_set(task, seed, source)
    raise DataError(f"a task of kind {type(task).__name__} has no questions")


def _split_data_set(
    task: DataSetTask, seed: int, source: Source
) -> tuple[list[Question], list[Question]]:
    fields = Fields(prompt=task.prompt_field, gold=task.answer_field, meta=task.meta_fields)
    read = partial(read_questions, kind=task.verifier, fields=fields)
    questions = read(source)
    random.Random(f"split {seed}").shuffle(questions)
    if task.heldout is None:
        heldout = questions
    elif task.heldout.endswith(".jsonl"):
        heldout = read(Source(task.heldout))
    else:
        heldout = load_benchmark(task.heldout)
    heldout = heldout[: task.heldout_prompts]
    excluded = {q.prompt for q in heldout}
    train = [q for q in questions if q.prompt not in excluded][: task.train_prompts]
    if not train:
        raise DataError(
            f"{source.path}: {len(questions)} questions, of which {len(heldout)} are held out,"
            " leave none to train on; lower heldout_prompts, or give a separate set as heldout"
        )
    return train, heldout


def demonstrations(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Make noisy demonstrations of the tasks as (prompt, completion), each task by its weight.

    Raises `DataError` for a task without demonstrations.
    """
    s, thinking = config.sft, config.generation.thinking_budget_tokens[1]
    total = sum(task.weight for task in config.tasks.values())
    heldout: set[str] = set()
    parts = []
    for name, task in config.tasks.items():
        count, seed = round(s.prompts * task.weight / total), config.seed_of(name)
        each, questions = s.demonstrations_per_prompt, load_split(task, seed)[1]
        match task:
            case ArithmeticTask():
                parts.append(arithmetic.demonstrations(task, seed, count, each, thinking))
                heldout |= {q.prompt if task.in_words else TINY(q.prompt) for q in questions}
            case LookupTask():
                parts.append(lookup.demonstrations(task, seed, count, each))
                heldout |= {TINY.bos + q.prompt for q in questions}
            case _:
                raise DataError(
                    f"{config.task_key(name)}.kind is {task.kind!r}: only arithmetic and lookup"
                    " have demonstrations; give a start_checkpoint"
                )
    # Never train on a prompt that another task holds out; one of a later turn begins with it.
    first = tuple(heldout)
    return (pair for part in parts for pair in part if not pair[0].startswith(first))
