"""Questions from a Hugging Face data set: by name, saved on disk, or as local files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.data.jsonl import Fields, questions, read_jsonl
from megatron_rl.data.question import DataError, Question

_LOADERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".arrow": "arrow"}


def read_huggingface(
    source: str,
    *,
    split: str = "train",
    subset: str | None = None,
    revision: str | None = None,
    kind: str = "math",
    fields: Fields | None = None,
    template: str | None = "{prompt}",
) -> list[Question]:
    """Questions of a data set.

    Args:
        source: name on the hub, a folder written by `save_to_disk`, a file (parquet, csv, json,
            arrow, jsonl), or JSON Lines files on the hub (`hf://datasets/owner/name/*.jsonl`).
        split: split, where there are several.
        subset: configuration name on the hub.
        revision: commit on the hub; pin it, or the data may change under a run.
        kind: task kind.
        fields: names of the fields.
        template: text of a prompt, with `{prompt}` in it; None: the question, and what its verifier
            reads (`INSTRUCTIONS`).

    Raises:
        DataError: the `datasets` library is missing, the data set cannot be loaded, or a row lacks
            prompt or answer.
    """
    path = Path(source)
    if path.suffix == ".jsonl" and path.is_file():
        return read_jsonl(path, kind=kind, fields=fields, template=template)
    rows = _load(source, split, subset, revision)
    return questions(rows, name=source, kind=kind, fields=fields, template=template)


def _load(source: str, split: str, subset: str | None, revision: str | None) -> Any:
    try:
        import datasets
    except ImportError as e:
        raise DataError(
            f"{source}: the datasets library is missing: install megatron_rl[data]"
        ) from e
    path = Path(source)
    try:
        if path.is_dir() and any((path / n).exists() for n in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(source)
            return _split_of(loaded, split, source) if hasattr(loaded, "keys") else loaded
        if path.is_file():
            loader = _LOADERS.get(path.suffix)
            if loader is None:
                known = ", ".join((*_LOADERS, ".jsonl"))
                raise DataError(f"{source}: unknown file type, use one of {known}")
            return datasets.load_dataset(loader, data_files=source, split="train")
        if source.startswith("hf://"):
            return datasets.load_dataset("json", data_files=source, split="train")
        return datasets.load_dataset(source, subset, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError) as e:  # what datasets raises: hub, files, names
        raise DataError(
            f"{source} (split {split}): {type(e).__name__}: {e}; without a network give a local"
            " copy"
        ) from e


def _split_of(loaded: Any, split: str, source: str) -> Any:
    if split not in loaded:
        raise DataError(f"{source}: no split {split!r}, it has {', '.join(loaded)}")
    return loaded[split]
