"""Evaluation sets by name: from a hub, or from a local copy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_rl.data.hf_dataset import read_huggingface
from megatron_rl.data.jsonl import Fields, read_jsonl
from megatron_rl.data.question import DataError, Question


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Where a set lives on the hub, and which of its fields is what."""

    source: str
    split: str
    kind: str
    fields: Fields
    subset: str | None = None


BENCHMARKS = {
    "aime2024": Benchmark(
        "HuggingFaceH4/aime_2024", "train", "math", Fields(prompt="problem", gold="answer", id="id")
    ),
    "aime2025": Benchmark(
        "math-ai/aime25", "test", "math", Fields(prompt="problem", gold="answer", id="id")
    ),
    "math500": Benchmark(
        "HuggingFaceH4/MATH-500",
        "test",
        "math",
        Fields(prompt="problem", gold="answer", difficulty="level", id="unique_id"),
    ),
    "livecodebench": Benchmark(
        "hf://datasets/livecodebench/code_generation_lite/test*.jsonl",
        "train",
        "code",
        Fields(
            prompt="question_content",
            gold="private_test_cases",
            difficulty="difficulty",
            id="question_id",
            starter="starter_code",
            meta=("metadata",),
        ),
    ),
}


def load_benchmark(
    name: str, local: str | Path | None = None, *, kind: str = "math", plain: bool = False
) -> list[Question]:
    """Questions of an evaluation set.

    Args:
        name: one of `BENCHMARKS` (case and punctuation don't matter), or the path of a JSONL file.
        local: a copy of the set: a file or a folder written by `save_to_disk`.
        kind: verifier of a JSONL file's rows that name none.
        plain: the questions alone, without what is asked of the answer's form.

    Raises:
        DataError: unknown name, or the set cannot be loaded; with the remedy.
    """
    template = "{prompt}" if plain else None
    if str(name).endswith(".jsonl"):
        return read_jsonl(name, kind=kind, template=template)
    key = "".join(c for c in str(name).lower() if c.isalnum())
    benchmark = BENCHMARKS.get(key)
    if benchmark is None:
        raise DataError(
            f"evaluation set {name!r} is unknown: use one of {', '.join(BENCHMARKS)}, or a .jsonl"
        )
    return read_huggingface(
        str(local or benchmark.source),
        split=benchmark.split,
        subset=benchmark.subset,
        kind=benchmark.kind,
        fields=benchmark.fields,
        template=template,
    )
