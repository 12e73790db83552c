"""Published data sets by name: their source on the hub and the names of their fields."""

from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.data.question import DataError, Question
from megatron_rl.data.tables import Fields, Source, read_questions


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set on the hub. Example: `DataSet("math-ai/aime25", split="test")`."""

    source: str
    kind: str = "math"
    """Verifier of its rows."""
    fields: Fields = field(default_factory=Fields)
    split: str = "train"
    subsets: tuple[str | None, ...] = (None,)
    """Configurations that are read one after the other."""


BENCHMARKS = {
    "aime2024": DataSet("HuggingFaceH4/aime_2024"),
    "aime2025": DataSet("math-ai/aime25", split="test"),
    "math500": DataSet("HuggingFaceH4/MATH-500", split="test"),
    "livecodebench": DataSet(
        "hf://datasets/livecodebench/code_generation_lite/test*.jsonl",
        "code",
        Fields(gold="private_test_cases", meta=("metadata",)),
    ),
}
"""Evaluation sets."""

TRAINING_SETS = {
    # `difficulty` is "3/8": 3 of 8 tries passed.
    "polaris": DataSet(
        "POLARIS-Project/Polaris-Dataset-53K",
        fields=Fields(prompt="problem", gold="answer", difficulty="difficulty"),
    ),
    # Only lcbv5 has `starter_code` and `metadata`.
    "deepcoder": DataSet(
        "agentica-org/DeepCoder-Preview-Dataset",
        "code",
        Fields(prompt="problem", gold="tests", starter="starter_code", meta=("metadata",)),
        subsets=("primeintellect", "taco", "lcbv5"),
    ),
}
"""Data sets that `megatron-rl data prepare` knows by name."""


def load_benchmark(
    name: str, local: str | Path | None = None, *, kind: str = "math", plain: bool = False
) -> list[Question]:
    """Load the questions of an evaluation set.

    Args:
        name: one of `BENCHMARKS` (case and punctuation do not matter), or a JSON Lines file.
        local: copy to read instead of the hub: a file, or a folder written by `save_to_disk`.
        kind: verifier of a JSON Lines file's rows that name none.
        plain: leave out the answer-format instruction.

    Raises `DataError`, with the remedy, if the name is unknown or the set cannot be loaded.
    """
    template = "{prompt}" if plain else None
    if name.endswith(".jsonl"):
        return read_questions(Source(name), kind=kind, template=template)
    benchmark = BENCHMARKS.get("".join(c for c in name.lower() if c.isalnum()))
    if benchmark is None:
        names = ", ".join(BENCHMARKS)
        raise DataError(f"evaluation set {name!r} is unknown: use one of {names}, or a .jsonl")
    source = Source(local or benchmark.source, split=benchmark.split)
    return read_questions(source, kind=benchmark.kind, fields=benchmark.fields, template=template)
