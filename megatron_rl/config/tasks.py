"""The tasks of a run: what is asked, who judges the answer, and each task's share of the prompts.

One task stands under `task`, several under `tasks` by name; `task` then says what they share:

    task: {heldout_prompts: 48}
    tasks:
      arithmetic: {weight: 2.0}                                # a name that is a kind needs none
      maths: {kind: jsonl, path: maths.jsonl, heldout: aime2024}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_rl.rewards.task_verifiers import KINDS as VERIFIERS
from megatron_rl.section import ConfigError, Section

KEYS = ("task", "tasks")


class Task(Section):
    """What every task has."""

    # `--task.subset 2024` is text where text is wanted.
    model_config = ConfigDict(coerce_numbers_to_str=True)

    weight: PositiveFloat = 1.0
    """Weight of the task's prompts in a batch, relative to the other tasks."""
    seed: NonNegativeInt | None = None
    """Seed of the questions and of their split; default: the run's `seed`."""


class ArithmeticTask(Task):
    """Integer expressions with precedence, `5+7+5*8=?`, made on the spot.

    The one kind with demonstrations, from which a tiny model makes its start.
    """

    kind: Literal["arithmetic"] = "arithmetic"
    """Task."""
    train_prompts: PositiveInt = 6000
    """Size of the training pool."""
    heldout_prompts: PositiveInt = 96
    """Held-out prompts: in neither stage's training data."""
    operand_weights: tuple[float, ...] = (0.2, 0.4, 0.4)
    """Shares of expressions with 2, 3, 4 ... operands."""
    products: Literal["some", "none", "one"] = "some"
    """Products of an expression: at most one, none at all (a chain of + and -), or exactly one."""


class ReasoningTask(Task):
    """Questions made and scored by reasoning-gym."""

    kind: Literal["reasoning"] = "reasoning"
    """Task."""
    dataset: str
    """reasoning-gym's name of the task, such as `chain_sum`."""
    level: NonNegativeInt = 0
    """Difficulty, 0 the easiest."""
    options: dict[str, Any] = Field(default_factory=dict)
    """More of the task's own settings, over those of the level."""
    train_prompts: PositiveInt = 2000
    """Size of the training pool."""
    heldout_prompts: PositiveInt = 100
    """Held-out prompts, all different from the training pool's."""


class DataSetTask(Task):
    """Questions of a data set."""

    verifier: str = "math"
    """Who judges: `math`, `code`, `exact`, `custom` (the function of `verifier.custom`), or the
    import path `package.module:function` of a reward function. A row's own `kind` wins."""
    template: str | None = None
    """Text of a prompt, with {prompt} in it, before the model's chat template. By default the
    question and, if it does not end with it, what its verifier reads: for `math` a box, for `code`
    a program in one block."""
    prompt_field: str = ""
    """Field of the question; empty looks for the usual names."""
    answer_field: str = ""
    """Field of the right answer, or of the tests; empty looks for the usual names."""
    meta_fields: tuple[str, ...] = ()
    """Fields that a reward function gets as its `meta`."""
    train_prompts: PositiveInt | None = None
    """Size of the training pool, at most; the whole data set by default."""
    heldout: str | None = None
    """Held-out questions: the name of an evaluation set (`aime2024`, `math500`), or a .jsonl that
    is read as this task is; by default they are set apart from the data set."""
    heldout_prompts: PositiveInt = 1000
    """Held-out prompts; of a set given as `heldout`, at most so many."""
    drop_long_prompts: bool = False
    """Leave out prompts over `generation.max_prompt_tokens` (else they are refused)."""

    @model_validator(mode="after")
    def _readable(self) -> Self:
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError(f"template is {self.template!r}: it must have {{prompt}} in it")
        if self.verifier not in VERIFIERS and ":" not in self.verifier:
            raise ValueError(
                f"verifier is {self.verifier!r}: one of {', '.join(VERIFIERS)}, or"
                " `package.module:function`"
            )
        return self


class JsonlTask(DataSetTask):
    """Questions of a JSON Lines file."""

    kind: Literal["jsonl"] = "jsonl"
    """Task."""
    path: Path
    """File with one question per line."""


class HuggingFaceTask(DataSetTask):
    """Questions of a Hugging Face data set."""

    kind: Literal["huggingface"] = "huggingface"
    """Task."""
    source: str
    """Name on the hub, a folder of `save_to_disk`, or a parquet, csv, json or arrow file."""
    split: str = "train"
    """Split, where there are several."""
    subset: str | None = None
    """Configuration name on the hub."""
    revision: str | None = None
    """Commit on the hub; pin it, or the data may change under a run."""


TaskChoice = Annotated[
    ArithmeticTask | ReasoningTask | JsonlTask | HuggingFaceTask,
    Field(discriminator="kind"),
]
TASK_KINDS = ("arithmetic", "reasoning", "jsonl", "huggingface")
DEFAULT_KIND = "arithmetic"


def named(task: Any, tasks: Any) -> Any:
    """The entries of `tasks`, with what `task` says of all of them; `task` alone under its kind.

    Raises:
        ConfigError: a task without a kind, or a name with a dot in it.
    """
    if isinstance(task, Task):
        task = task.model_dump()
    shared = {"kind": task} if isinstance(task, str) else task or {}
    if not isinstance(shared, dict) or not isinstance(tasks or {}, dict):
        return tasks or {"task": task}  # not a mapping: validation says so
    if not tasks:
        kind = shared.get("kind", DEFAULT_KIND)
        return {str(kind): {"kind": kind, **shared}}
    found: dict[str, Any] = {}
    for name, entry in tasks.items():
        if "." in str(name):
            raise ConfigError(f"tasks: the name {name!r} has a dot in it; take another")
        if isinstance(entry, str):
            entry = {"kind": entry}
        if entry is None:
            entry = {}
        if not isinstance(entry, dict):
            found[name] = entry
            continue
        own = {**shared, **entry}
        if "kind" not in own:
            if name not in TASK_KINDS:
                raise ConfigError(f"tasks.{name}.kind is missing: one of {', '.join(TASK_KINDS)}")
            own["kind"] = name
        found[name] = own
    return found


def task_arguments(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The other arguments, and those of `task` and `tasks` as nested values.

    Example: `["--seed", "3", "--tasks.maths.weight", "2"]` gives `["--seed", "3"]` and
    `{"tasks": {"maths": {"weight": 2}}}`.

    Raises:
        ConfigError: a key under one that has a value already.
    """
    others: list[str] = []
    found: dict[str, Any] = {}
    pending = list(arguments)
    while pending:
        name = pending.pop(0)
        path = name.removeprefix("--").split(".")
        if not name.startswith("--") or path[0] not in KEYS:
            others.append(name)
            continue
        alone = not pending or pending[0].startswith("--")
        value = True if alone else _value(pending.pop(0))
        into = found
        for part in path[:-1]:
            below = into.setdefault(part, {})
            if isinstance(below, str):  # a task given by its kind
                below = into[part] = {"kind": below}
            if not isinstance(below, dict):
                raise ConfigError(f"command line: {name}: {part} is {below!r} already")
            into = below
        into[path[-1]] = value
    return others, found


def _value(text: str) -> Any:
    value = yaml.safe_load(text)
    # YAML's other words for true and false (yes, no, on, off) are names here.
    return text if isinstance(value, bool) and text.lower() not in ("true", "false") else value
