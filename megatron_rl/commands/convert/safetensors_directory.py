"""Tensors of a Hugging Face directory by name, and its other files."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.commands.convert.resumable import SUMS, ConvertError

INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|index\.json)")


class SafetensorsDirectory:
    """Tensors of `model.safetensors`, of the files of an `INDEX`, or of those of a glob `pattern`.

    A file is mapped only while one of its tensors is in use: resident memory is that of the bytes
    in use, not of every page that was ever read.

    Raises:
        ConvertError: a file is missing or torn, or index and files differ.
    """

    def __init__(self, directory: Path, pattern: str = "model.safetensors") -> None:
        self.directory, index, names = directory, directory / INDEX, None
        self.files = sorted(directory.glob(pattern)) or [directory / pattern]
        self.tensors: dict[str, Tensor] = {}  # on the meta device: shape and dtype
        self.file_of: dict[str, Path] = {}
        if pattern == "model.safetensors" and index.is_file():
            names = json.loads(index.read_text())["weight_map"]
            self.files = [directory / name for name in sorted(set(names.values()))]
        for path in self.files:
            if not path.is_file():
                raise ConvertError(f"{path}: missing; the checkpoint is incomplete")
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  # not a dictionary
                        tensor = file.get_tensor(name)
                        self.tensors[name] = torch.empty_like(tensor, device="meta")
                        self.file_of[name] = path
            except SafetensorError as e:
                text = f"{path}: not a safetensors file, or truncated ({e}): fetch it again"
                raise ConvertError(text) from None
        if names is not None and (differ := sorted(names.keys() ^ self.tensors.keys())):
            raise ConvertError(f"{index}: names differ from those in its files: {differ[:5]}")

    def read(self, name: str) -> Tensor:
        """Return a tensor that is mapped from its file: only what is used of it is read."""
        with safe_open(self.file_of[name], framework="pt") as file:
            return file.get_tensor(name)


def read_config(directory: Path) -> dict[str, Any]:
    """Return the contents of config.json, or raise ConvertError if there is none."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConvertError(f"{path}: missing; a Hugging Face model directory has one")
    return json.loads(path.read_text())


def copy_other_files(source: Path, target: Path) -> None:
    """Copy the files that hold no weights: config.json, tokenizer, license, code."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        skipped = path.name.startswith(".") or path.name == SUMS or WEIGHTS.fullmatch(path.name)
        if path.is_file() and not skipped:
            shutil.copyfile(path, target / path.name)
            os.chmod(target / path.name, 0o644)
