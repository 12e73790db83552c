"""What `megatron-rl data prepare` is told, and the data sets that it knows by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.data.jsonl import Fields


@dataclass(frozen=True, slots=True)
class Known:
    """Where a data set is on the hub, and what its fields mean."""

    source: str
    kind: str
    fields: Fields
    subsets: tuple[str | None, ...] = (None,)
    split: str = "train"


KNOWN = {
    # problem, answer, difficulty ("3/8": passes of 8 tries)
    "polaris": Known(
        "POLARIS-Project/Polaris-Dataset-53K",
        "math",
        Fields(prompt="problem", gold="answer", difficulty="difficulty"),
    ),
    # problem, tests (JSON), starter_code and metadata in lcbv5
    "deepcoder": Known(
        "agentica-org/DeepCoder-Preview-Dataset",
        "code",
        Fields(prompt="problem", gold="tests", starter="starter_code", meta=("metadata",)),
        subsets=("primeintellect", "taco", "lcbv5"),
    ),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """All that decides what is written."""

    source: str
    """Name on the hub, file or folder."""
    name: str
    """Prefix of the questions' ids."""
    kind: str = "math"
    """Verifier of rows that name none."""
    fields: Fields = field(default_factory=Fields)
    subsets: tuple[str | None, ...] = (None,)
    split: str = "train"
    revision: str | None = None
    template: str | None = None
    """Text of a prompt with `{prompt}` in it; None: the question and what its verifier reads."""
    against: tuple[str, ...] = ()
    """Evaluation sets that no question may overlap with: `name`, `name=path` or a .jsonl."""
    ngram_words: int = 8
    overlap: float = 0.5
    """Share of shared n-grams from which on two questions overlap."""
    heldout: int = 1000
    """Held-out questions."""
    tokenizer: str | None = None
    """Folder with a tokenizer.json, or the file."""
    max_tokens: int = 2048
    """Longest prompt, where there is a tokenizer."""
    max_answer_kib: int = 4096
    """Longest answer, or tests."""
    keep_unreadable: bool = False
    """Keep questions whose answer the verifier cannot read."""
    seed: int = 0
    """Seed of the held-out split."""
