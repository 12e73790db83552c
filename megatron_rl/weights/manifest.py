"""The on-disk format of a weight version, checksums, and the checks that refuse a version.

Layout of one version (format 1):

    <directory>/v000021/
        00000.safetensors   buckets, in the order of the stream
        00001.safetensors
        manifest.json       {"format": 1, "manifest": {version, path, buckets, checksums, ...}}

Writing: everything goes to a hidden folder next to it, `manifest.json` last, and one rename makes
`v000021` appear. A folder of that name is therefore complete; a killed writer leaves a hidden
folder that is never read, and the next publisher on the directory removes it.
Reading: the blake2b-128 checksum of each bucket is compared before a tensor of it is used, and
names, shapes and dtypes are compared with the manifest. Any difference is refused with a
`WeightsError`; nothing is repaired: the remedy is always to publish the version again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Buffer, Mapping
from pathlib import Path

import msgspec

from megatron_rl.messages import Manifest, TensorInfo

FORMAT = 1
MANIFEST_FILE = "manifest.json"


class WeightsError(RuntimeError):
    """A weight version that cannot be used; names version, file or tensor, and the remedy."""


def checksum(data: Buffer) -> str:
    """Return blake2b-128 of these bytes, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def version_folder(directory: Path, version: int) -> Path:
    """Return the folder of a complete version."""
    return directory / f"v{version:06d}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into `folder`."""
    content = {"format": FORMAT, "manifest": msgspec.to_builtins(manifest)}
    (folder / MANIFEST_FILE).write_text(json.dumps(content))


def check_tensors(
    tensors: tuple[TensorInfo, ...], expected: Mapping[str, TensorInfo], version: int
) -> None:
    """Refuse a version whose tensors are not exactly those that the engine takes.

    Args:
        tensors: announced by the manifest.
        expected: by name: the trained tensors of the checkpoint that the engine started from, in
            the form in which they travel (`number_format.WireFormat.expected`).
        version: for the message.

    Raises:
        WeightsError: a name that is missing, unexpected or doubled, another shape or dtype.
    """
    announced = {t.name: t for t in tensors}
    missing = sorted(expected.keys() - announced.keys())
    extra = sorted(announced.keys() - expected.keys())
    if missing or extra or len(announced) != len(tensors):
        doubled = len(tensors) - len(announced)
        raise WeightsError(
            f"weights version {version}: the names are not those of the start checkpoint:"
            f" {len(missing)} missing {missing[:4]}, {len(extra)} unexpected {extra[:4]},"
            f" {doubled} doubled; the exporter must write the checkpoint's own names, each once"
        )
    for name, info in announced.items():
        wanted = expected[name]
        if tuple(info.shape) != tuple(wanted.shape):
            raise WeightsError(
                f"weights version {version}: {name} has shape {list(info.shape)}, the start"
                f" checkpoint has {list(wanted.shape)}; trainer and engine have different models"
            )
        if info.dtype != wanted.dtype:
            raise WeightsError(
                f"weights version {version}: {name} is {info.dtype}, the engine holds"
                f" {wanted.dtype}; give trainer and generators one configuration"
                " (precision.params, weights.dtype, weights.quantization)"
            )
