"""Reasoning tasks made on the spot by reasoning-gym, at a chosen difficulty."""

from __future__ import annotations

import json
import warnings
from typing import Any

from megatron_rl.data.question import BOX_INSTRUCTION, DataError, Question

CHOSEN = (
    "basic_arithmetic",
    "chain_sum",
    "countdown",
    "gcd",
    "lcm",
    "prime_factorization",
    "simple_equations",
    "fraction_simplification",
    "base_conversion",
    "number_sorting",
    "spell_backward",
    "letter_counting",
    "leg_counting",
    "calendar_arithmetic",
    "family_relationships",
    "knights_knaves",
    "syllogism",
    "zebra_puzzles",
    "largest_island",
    "shortest_path",
    "maze",
    "mini_sudoku",
    "tower_of_hanoi",
    "string_manipulation",
)
"""Tasks whose answers are short and cheaply scored; any other of the library's is possible."""


def make_reasoning(
    task: str, *, count: int, seed: int, level: int = 0, options: dict[str, Any] | None = None
) -> list[Question]:
    """The same questions for the same arguments.

    Args:
        task: reasoning-gym's name of the task (`CHOSEN` is a good list).
        count: questions; all are different, or there is an error.
        seed: seed.
        level: difficulty, 0 is the easiest; levels above a task's last one are refused.
        options: more of the task's own settings, over those of the level.

    Raises:
        DataError: no such task, level or option, or too few different questions.
    """
    factory = _factory()
    if task == "codeio" or task not in factory.DATASETS:
        raise DataError(f"reasoning task {task!r} is not offered; try {', '.join(CHOSEN)}")
    settings = {**_level(factory, task, level), **(options or {})}
    # Easy tasks repeat themselves: so many are made until enough are different.
    try:
        dataset = factory.create_dataset(task, **settings, seed=seed, size=max(20 * count, 200))
    except (TypeError, AssertionError, ValueError) as e:
        raise DataError(f"reasoning task {task!r} with {settings}: {e}") from e
    out: dict[str, Question] = {}
    for index in range(len(dataset)):
        entry = dataset[index]
        if entry["question"] not in out and entry["answer"] is not None:
            question = _question(task, level, len(out), entry)
            out[entry["question"]] = question
        if len(out) == count:
            return list(out.values())
    raise DataError(
        f"reasoning task {task!r} at level {level} has only {len(out)} different questions,"
        f" {count} are wanted: raise the level or lower the count"
    )


def _question(task: str, level: int, index: int, entry: dict[str, Any]) -> Question:
    # Through JSON at once: what a worker gets later is what is hashed and saved now.
    entry = json.loads(json.dumps(entry, default=str))
    return Question(
        id=f"{task}/{level}/{index}",
        kind="reasoning",
        prompt=f"{entry['question']}\n{BOX_INSTRUCTION}",
        gold=str(entry["answer"]),
        meta={"dataset": task, "entry": entry},
        difficulty=str(level),
    )


def _factory() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym import factory
    except ImportError as e:
        raise DataError(f"reasoning-gym is missing ({e}): install megatron_rl[rewards]") from e
    return factory


def _level(factory: Any, task: str, level: int) -> dict[str, Any]:
    """The task's settings at a level of its curriculum."""
    if not factory.has_curriculum(task):
        if level:
            raise DataError(f"reasoning task {task!r} has no levels: use level 0 and options")
        return {}
    curriculum = factory.create_curriculum(task)
    # An attribute with fewer levels stays at its last one.
    last = max((len(a.levels) for a in curriculum.attributes.values()), default=1) - 1
    if not 0 <= level <= last:
        raise DataError(f"reasoning task {task!r} has levels 0 to {last}, not {level}")
    curriculum.set_global_level(level)
    configuration = curriculum.generate_configuration()
    names = configuration.__dataclass_fields__
    return {n: getattr(configuration, n) for n in names if n not in ("seed", "size")}
