"""Settings of `megatron-rl data prepare`; the command's options explain them."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.data.tables import Fields


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    """All inputs of the written files; they are recorded in report.json."""

    source: str
    name: str
    """Prefix of the questions' ids."""
    kind: str = "math"
    fields: Fields = field(default_factory=Fields)
    subsets: tuple[str | None, ...] = (None,)
    split: str = "train"
    revision: str | None = None
    template: str | None = None
    against: tuple[str, ...] = ()
    """Evaluation sets: `name`, `name=path of a local copy`, or a .jsonl."""
    ngram_words: int = 8
    overlap: float = 0.5
    heldout: int = 1000
    tokenizer: str | None = None
    """Folder with a tokenizer.json, or the file."""
    max_tokens: int = 2048
    max_answer_kib: int = 4096
    keep_unreadable: bool = False
    seed: int = 0
