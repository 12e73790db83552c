"""Evaluation sets by name: from a hub, or from a local copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.data.huggingface import read_huggingface
from megatron_rl.data.jsonl import Fields, read_jsonl
from megatron_rl.data.question import BOX_INSTRUCTION, DataError, Question

CODE_INSTRUCTION = "Answer with one complete Python program in a ```python block."
INSTRUCTIONS = {"math": BOX_INSTRUCTION, "code": CODE_INSTRUCTION}
"""What follows the question, by the verifier that reads the answer."""


def template_for(kind: str) -> str:
    """Text of a prompt whose answer a verifier reads; the question alone for other kinds."""
    return f"{{prompt}}\n{INSTRUCTIONS[kind]}" if kind in INSTRUCTIONS else "{prompt}"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Where a set lives on the hub, and which of its fields is what."""

    source: str
    split: str
    kind: str
    fields: Fields
    subset: str | None = None

    @property
    def template(self) -> str:
        """Text of a prompt."""
        return template_for(self.kind)


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
    if str(name).endswith(".jsonl"):
        found = read_jsonl(name, kind=kind)
        return found if plain else [_instructed(q) for q in found]
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
        template="{prompt}" if plain else benchmark.template,
    )


def _instructed(question: Question) -> Question:
    """The question with what its verifier reads asked for; once, where it is asked for already."""
    instruction = INSTRUCTIONS.get(question.kind, "")
    if question.prompt.rstrip().endswith(instruction):
        return question
    return replace(
        question, prompt=template_for(question.kind).replace("{prompt}", question.prompt)
    )
