"""The on-disk format of a weight version: `manifest.json`, checksums, and what is refused.

Layout of one version (format 1):

    <directory>/v000021/
        00000.safetensors   buckets, in the order of the stream
        00001.safetensors
        manifest.json       {"format": 1, "manifest": {version, path, buckets, checksums, ...}}

Writing: everything goes to a hidden folder beside it, `manifest.json` last, and one rename makes
`v000021` appear. A folder of that name is therefore complete; what a killed writer leaves is a
hidden folder that nobody reads, and the next publisher on the directory removes it.
Reading: the blake2b-128 checksum of each bucket is compared before a tensor of it is used, and
names, shapes and dtypes are compared with the manifest. Anything that differs is refused with a
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
    """blake2b-128 of these bytes, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def version_folder(directory: Path, version: int) -> Path:
    """Folder of a complete version."""
    return directory / f"v{version:06d}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into `folder`."""
    content = {"format": FORMAT, "manifest": msgspec.to_builtins(manifest)}
    (folder / MANIFEST_FILE).write_text(json.dumps(content))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a version's folder.

    Raises:
        WeightsError: no manifest, another format, or one that does not parse.
    """
    path = folder / MANIFEST_FILE
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise WeightsError(
                f"{path}: format {content['format']}, this build reads format {FORMAT}; use the"
                " same megatron_rl on both sides"
            )
        return msgspec.convert(content["manifest"], Manifest)
    except FileNotFoundError:
        raise WeightsError(
            f"{path}: missing; the version was never completed or was deleted: publish it again"
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError, msgspec.ValidationError) as e:
        raise WeightsError(f"{path}: not a manifest ({e}); publish the version again") from None


def check_tensors(
    tensors: tuple[TensorInfo, ...], expected: Mapping[str, TensorInfo], version: int
) -> None:
    """Refuse a version whose tensors are not exactly those that the engine takes.

    Args:
        tensors: what the manifest announces.
        expected: by name: the trained tensors of the checkpoint that the engine started from, in
            the form in which they travel (`wire.WireFormat.expected`).
        version: for the message.

    Raises:
        WeightsError: a name that is missing, unexpected or doubled, another shape or dtype.
    """
    got = {t.name: t for t in tensors}
    missing = sorted(expected.keys() - got.keys())
    extra = sorted(got.keys() - expected.keys())
    if missing or extra or len(got) != len(tensors):
        doubled = len(tensors) - len(got)
        raise WeightsError(
            f"weights version {version}: the names are not those of the start checkpoint:"
            f" {len(missing)} missing {missing[:4]}, {len(extra)} unexpected {extra[:4]},"
            f" {doubled} doubled; the exporter must write the checkpoint's own names, each once"
        )
    for name, found in got.items():
        wanted = expected[name]
        if tuple(found.shape) != tuple(wanted.shape):
            raise WeightsError(
                f"weights version {version}: {name} has shape {list(found.shape)}, the start"
                f" checkpoint has {list(wanted.shape)}; the trainer exports another model than the"
                " engine's"
            )
        if found.dtype != wanted.dtype:
            raise WeightsError(
                f"weights version {version}: {name} is {found.dtype}, the engine holds"
                f" {wanted.dtype}; give trainer and generators one configuration"
                " (precision.params, weights.dtype, weights.quantization)"
            )
