"""Tensors of a Hugging Face directory by name, for the trainer and for conversions."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.models import CheckpointError
from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Weight

INDEX = "model.safetensors.index.json"


class SafetensorsDirectory:
    """Tensors of `model.safetensors`, of the files of an `INDEX`, or of those of a glob `pattern`.

    A file is mapped only while one of its tensors is in use: resident memory is that of the bytes
    in use, not of every page that was ever read.

    Raises:
        CheckpointError: a file is missing or torn, or index and files differ.
    """

    def __init__(self, directory: str | Path, pattern: str = "model.safetensors") -> None:
        self.directory = directory = Path(directory)
        self.files = sorted(directory.glob(pattern)) or [directory / pattern]
        self.tensors: dict[str, Tensor] = {}  # on the meta device: shape and dtype
        self.file_of: dict[str, Path] = {}
        index, listed = directory / INDEX, None
        if pattern == "model.safetensors" and index.is_file():
            names = json.loads(index.read_text())["weight_map"]
            listed = {name: directory / file for name, file in names.items()}
            self.files = sorted(set(listed.values()))
        for path in self.files:
            if not path.is_file():
                raise CheckpointError(f"{path}: missing; the checkpoint is incomplete")
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  # not a dictionary
                        tensor = file.get_tensor(name)
                        self.tensors[name] = torch.empty_like(tensor, device="meta")
                        self.file_of[name] = path
            except SafetensorError as e:
                text = f"{path}: not a safetensors file, or truncated ({e}): fetch it again"
                raise CheckpointError(text) from None
        if listed is not None and listed != self.file_of:
            wrong = sorted(dict(listed.items() ^ self.file_of.items()))
            raise CheckpointError(
                f"{index} and its files disagree on {', '.join(wrong[:5])}: they are of different"
                " checkpoints; copy the directory again"
            )

    def check(self, architecture: Architecture) -> list[str]:
        """Return the names that are ignored, which tools for fine-tuning have left.

        Raises:
            CheckpointError: other names or shapes than those of config.json, or a second copy of
                tied embeddings that is another matrix.
        """
        expected = architecture.shapes()
        actual = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        leftovers = architecture.leftovers(actual.keys() - expected)
        unknown = actual.keys() - expected - {*architecture.passthrough(actual), *leftovers}
        problems = [f"{name} is missing" for name in sorted(expected.keys() - actual)]
        problems += [f"{name} is unknown" for name in sorted(unknown)]
        problems += [
            f"{name} is {list(actual[name])}, but config.json makes it {list(shape)}"
            for name, shape in expected.items()
            if actual.get(name, shape) != shape
        ]
        if problems:
            text = f"{self.directory} does not hold the tensors of its config.json: "
            raise CheckpointError(text + "; ".join(problems[:5]))
        embedding = architecture.weights()[0].hf[0]
        for name in (name for name in leftovers if name.endswith("lm_head.weight")):
            if not self.read(name).equal(self.read(embedding)):
                raise CheckpointError(
                    f"{self.directory} has another {name} than {embedding}, and its config.json"
                    " ties them: set tie_word_embeddings to false there to keep both, or remove"
                    f" {name}"
                )
        return leftovers

    def read(self, name: str) -> Tensor:
        """Return a tensor that is mapped from its file: only what is used of it is read."""
        with safe_open(self.file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def parameter(self, weight: Weight) -> Tensor:
        """Return the full Megatron tensor of a weight."""
        tensors = [self.read(name) for name in weight.hf]
        if weight.index is not None:
            tensors = [tensor[weight.index] for tensor in tensors]
        return weight.pack.to_megatron(tensors)


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the contents of config.json, or raise CheckpointError if there is none."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; a Hugging Face model directory has one")
    config: dict[str, Any] = json.loads(path.read_text())
    return config
