"""The tasks of a run: questions, verifier, and the share of each task in a batch.

A single task is given as `task`, several as `tasks` by name; `task` then has their shared keys:

    task: {heldout_prompts: 48}
    tasks:
      arithmetic: {weight: 2.0}                                # the name is a kind
      maths: {kind: jsonl, path: maths.jsonl, heldout: aime2024}
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic.types import NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.rewards.task_verifiers import KINDS as VERIFIERS
from megatron_rl.section import ConfigError, Section, typed


class Task(Section):
    """Keys of every kind of task."""

    # `subset: 2024` in YAML is a number where text is expected.
    model_config = ConfigDict(coerce_numbers_to_str=True)

    weight: PositiveFloat = 1.0
    """Share of the task's prompts in a batch, relative to the other tasks."""
    seed: NonNegativeInt | None = None
    """Seed of the questions and of their split; default: the `seed` of the run."""
    rollout: str = "single_turn"
    """Rollout function, from a prompt to a completion: `single_turn`, `tools`, `environment`,
    `agent`, or the import path `package.module:function` of one."""
    tools: tuple[str, ...] = ()
    """Tools of `rollout: tools`: `python`, or import paths `package.module:function`."""
    environment: str = ""
    """Environment of `rollout: environment`: `package.module:Class`, or `verifiers:NAME`."""
    environment_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    agent: str = ""
    """Agent of `rollout: agent`: import path `package.module:function` of a function that talks
    with the policy by an OpenAI client, `agent(base_url, api_key, row)`, and returns the reward."""

    @property
    def is_single_turn(self) -> bool:
        """True if a rollout is one turn after the question's prompt."""
        return self.rollout == "single_turn"

    @model_validator(mode="after")
    def _names_its_rollout(self) -> Self:
        names = {"tools": self.tools, "environment": self.environment, "agent": self.agent}
        if self.rollout in names and not names[self.rollout]:
            raise ValueError(
                f"rollout is {self.rollout!r}, and {self.rollout} is empty: give import paths"
            )
        return self


class ArithmeticTask(Task):
    """Generated integer expressions with precedence, `5+7+5*8=?`.

    It has demonstrations, from which a model makes its start (`sft.first`).
    """

    kind: Literal["arithmetic"] = "arithmetic"
    train_prompts: PositiveInt = 6000
    """Size of the training pool."""
    heldout_prompts: PositiveInt = 96
    """Held-out prompts; neither stage trains on them."""
    operand_weights: tuple[float, ...] = (0.2, 0.4, 0.4)
    """Shares of expressions with 2, 3, 4 ... operands."""
    products: Literal["some", "none", "one"] = "some"
    """Products of an expression: at most one, none (only + and -), or exactly one."""
    in_words: bool = False
    """Ask in English, `What is five plus seven?`, for a model with a chat template; the answer goes
    to the math verifier."""


class LookupTask(Task):
    """Chains of lookups in a table that only the tool knows, `2;4733?`, for the tiny models.

    It has demonstrations, as `arithmetic` has.
    """

    kind: Literal["lookup"] = "lookup"
    rollout: str = "tools"
    """As of every task; the table can be read by its tool only."""
    tools: tuple[str, ...] = ("megatron_rl.data.lookup:lookup",)
    """Tools of `rollout: tools`; a tiny model can call this one only."""
    hops: tuple[PositiveInt, PositiveInt] = (2, 3)
    """Fewest and most lookups of a question, at most 9."""
    train_prompts: PositiveInt = 6000
    """Size of the training pool."""
    heldout_prompts: PositiveInt = 96
    """Held-out prompts; neither stage trains on them."""

    @model_validator(mode="after")
    def _solvable(self) -> Self:
        if not self.hops[0] <= self.hops[1] <= 9:
            raise ValueError(f"hops is {list(self.hops)}: give the fewest, then the most, up to 9")
        if not self.tools:
            raise ValueError(
                "tools is empty: nothing but the tool can read the table; leave it out"
            )
        return self


class ReasoningTask(Task):
    """Questions that reasoning-gym generates and scores."""

    kind: Literal["reasoning"] = "reasoning"
    dataset: str
    """Name of the task in reasoning-gym, such as `chain_sum`."""
    level: NonNegativeInt = 0
    """Difficulty; 0 is the easiest."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the task in reasoning-gym, which override those of the level."""
    train_prompts: PositiveInt = 2000
    """Size of the training pool."""
    heldout_prompts: PositiveInt = 100
    """Held-out prompts; the training pool has none of them."""

    @field_validator("options")
    @classmethod
    def _typed(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Convert text to the types of JSON."""
        return {name: typed(value) for name, value in options.items()}


class DataSetTask(Task):
    """Questions of a data set."""

    verifier: str = "math"
    """Verifier of the answers: `math`, `code`, `exact`, `custom` (the function of
    `verifier.custom`), or the import path `package.module:function` of a reward function. A field
    `kind` of a row overrides it."""
    template: str | None = None
    """Text of a prompt, with {prompt} in it, before the model's chat template. By default the
    question, followed by the answer format of the verifier if it does not end with it: a box for
    `math`, a program in one block for `code`."""
    prompt_field: str = ""
    """Field of the question; empty: one of the usual names."""
    answer_field: str = ""
    """Field of the right answer, or of the tests; empty: one of the usual names."""
    meta_fields: tuple[str, ...] = ()
    """Fields that a reward function receives as its `meta`."""
    train_prompts: PositiveInt | None = None
    """Largest size of the training pool; default: the whole data set."""
    heldout: str | None = None
    """Held-out questions: name of an evaluation set (`aime2024`, `math500`), or a .jsonl with the
    same fields; default: a part of the data set."""
    heldout_prompts: PositiveInt = 1000
    """Held-out prompts; of a set given as `heldout`, the first ones."""
    drop_long_prompts: bool = False
    """Drop prompts over `generation.max_prompt_tokens`, which are an error otherwise."""

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
    path: Path
    """File with one question per line."""


class HuggingFaceTask(DataSetTask):
    """Questions of a Hugging Face data set, or of local files."""

    kind: Literal["huggingface"] = "huggingface"
    source: str
    """Name on the hub, a folder of `save_to_disk`, or a parquet, csv, json, jsonl or arrow file or
    a folder of such files."""
    split: str = "train"
    """Split of the data set; in a folder, the files whose names begin with it."""
    subset: str | None = None
    """Configuration name on the hub, or subfolder of a folder."""
    revision: str | None = None
    """Commit on the hub; pin it, or the data may change under a run."""


TaskChoice = Annotated[
    ArithmeticTask | LookupTask | ReasoningTask | JsonlTask | HuggingFaceTask,
    Field(discriminator="kind"),
]
TASK_KINDS = ("arithmetic", "lookup", "reasoning", "jsonl", "huggingface")


def named_tasks(task: Any, tasks: Any) -> Any:
    """Merge `task`, the keys that all tasks share, into the entries of `tasks`.

    A `task` without `tasks` becomes an entry under the name of its kind.

    Raises:
        ConfigError: a task without a kind, or a name with a dot in it.
    """
    if isinstance(task, Task):
        task = task.model_dump()
    shared = {"kind": task} if isinstance(task, str) else task or {}
    if not isinstance(shared, dict) or not isinstance(tasks or {}, dict):
        return tasks or {"task": task}  # not a mapping: validation reports it
    if not tasks:
        kind = shared.get("kind", "arithmetic")
        return {str(kind): {"kind": kind, **shared}}
    merged: dict[str, Any] = {}
    for name, entry in tasks.items():
        if "." in str(name):
            raise ConfigError(f"tasks: the name {name!r} has a dot in it; take another")
        entry = {"kind": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict | None):
            merged[name] = entry  # validation reports it
            continue
        values = {**shared, **(entry or {})}
        if "kind" not in values and name not in TASK_KINDS:
            raise ConfigError(f"tasks.{name}.kind is missing: one of {', '.join(TASK_KINDS)}")
        merged[name] = {"kind": name, **values}
    return merged
