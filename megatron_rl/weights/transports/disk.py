"""Transport `disk`: a version is a folder of safetensors buckets, best in shared memory.

Layout and recovery rules: `megatron_rl.weights.manifest`. Publisher and readers need only a file
system that both see, so one publisher serves any number of generators and tensor-parallel ranks,
and a reader that dies affects no other.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from megatron_rl.messages import Manifest, TensorInfo
from megatron_rl.weights.buckets import dtype_name, into_buckets, manifest_of, tensor_info
from megatron_rl.weights.manifest import WeightsError, checksum, version_folder, write_manifest
from megatron_rl.weights.transports.base import LoadWeights, Publisher, Receiver, WeightStream

_HIDDEN = ".writing-"


class DiskPublisher(Publisher):
    """Writes versions into `directory` and deletes unneeded ones.

    Example: `DiskPublisher(Path("/dev/shm/run"), keep=2).publish(21, stream, 256 * 2**20)`.
    """

    def __init__(self, directory: Path, keep: int = 2) -> None:
        super().__init__(keep)
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for left_behind in directory.glob(f"{_HIDDEN}*"):
            shutil.rmtree(left_behind)

    def publish(self, version: int, stream: WeightStream, bucket_bytes: int) -> Manifest:
        """Write `version`; its folder appears when its last byte is written."""
        self._check_newer(version)
        folder = version_folder(self.directory, version)
        hidden = self.directory / f"{_HIDDEN}{version:06d}"
        hidden.mkdir()
        try:
            manifest = _write(hidden, folder, version, stream, bucket_bytes)
            if folder.exists():  # of an earlier run that was killed
                shutil.rmtree(folder)
            hidden.rename(folder)
        except OSError as e:
            shutil.rmtree(hidden, ignore_errors=True)
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise WeightsError(
                f"weights version {version}: {self.directory} is full ({e.strerror}) with versions"
                f" {list(self.versions)} on it; set weights.directory to a larger file system"
            ) from e
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        self._add(version)
        return manifest

    def close(self) -> None:
        """Delete every version of this publisher, and the directory if nothing else is in it."""
        super().close()
        if self.directory.is_dir() and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def _remove(self, versions: list[int]) -> None:
        for version in versions:
            shutil.rmtree(version_folder(self.directory, version), ignore_errors=True)


class DiskReceiver(Receiver):
    """Reads a version bucket by bucket; the generator compared all checksums before."""

    def load(self, manifest: Manifest, load_weights: LoadWeights) -> None:
        """Load from the files; each bucket's checksum is compared once more before it is used."""
        load_weights(read_buckets(manifest))


def _write(
    hidden: Path, folder: Path, version: int, stream: WeightStream, bucket_bytes: int
) -> Manifest:
    buckets: dict[str, str] = {}
    entries: list[list[TensorInfo]] = []
    for bucket in into_buckets(stream, bucket_bytes, version):
        data, name = save(bucket), f"{len(buckets):05d}.safetensors"
        (hidden / name).write_bytes(data)
        buckets[name] = checksum(data)
        entries.append([tensor_info(name, tensor) for name, tensor in bucket.items()])
    manifest = manifest_of(version, buckets, entries, path=str(folder))
    write_manifest(hidden, manifest)
    return manifest


def check_buckets(manifest: Manifest) -> None:
    """Compare every bucket's checksum, without loading it.

    Raises:
        WeightsError: a bucket is missing, unreadable or differs.
    """
    for name, expected in zip(manifest.buckets, manifest.checksums, strict=True):
        path = _bucket_path(manifest, name)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _compare(manifest, path, expected, checksum(data))


def read_buckets(manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a version in the order of the manifest; check each bucket first.

    Raises:
        WeightsError: a bucket is missing or torn, or holds other tensors than announced; then no
            tensor of that bucket was yielded.
    """
    announced = {t.name: t for t in manifest.tensors}
    read = 0
    for name, expected in zip(manifest.buckets, manifest.checksums, strict=True):
        path = _bucket_path(manifest, name)
        data = path.read_bytes()
        _compare(manifest, path, expected, checksum(data))
        try:
            tensors = load(data)
        except SafetensorError as e:
            raise WeightsError(f"{_name(manifest, path)}: not a safetensors file ({e})") from e
        for tensor_name, tensor in tensors.items():
            info = announced.get(tensor_name)
            shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
            if info is None or (shape, dtype) != (tuple(info.shape), info.dtype):
                raise WeightsError(
                    f"{_name(manifest, path)}: {tensor_name} is {dtype}{list(shape)}, the"
                    f" manifest says {info and f'{info.dtype}{list(info.shape)}'}; publish the"
                    " version again"
                )
        # safetensors sorts by name inside a file; the manifest's order is the stream's.
        for info in manifest.tensors[read : read + len(tensors)]:
            if info.name not in tensors:
                raise WeightsError(
                    f"{_name(manifest, path)}: {info.name} is announced but not in it; publish"
                    " the version again"
                )
            yield info.name, tensors[info.name]
        read += len(tensors)
    if read != len(manifest.tensors):
        raise WeightsError(
            f"weights version {manifest.version} in {manifest.path}: {read} tensors in the"
            f" buckets, {len(manifest.tensors)} in the manifest; publish the version again"
        )


def _bucket_path(manifest: Manifest, name: str) -> Path:
    path = Path(manifest.path) / name
    if not path.is_file() or os.path.getsize(path) == 0:
        raise WeightsError(
            f"{_name(manifest, path)}: missing or empty; it was deleted before this generator"
            " took it: publish again, and release a version only when every generator is past it"
        )
    return path


def _compare(manifest: Manifest, path: Path, expected: str, actual: str) -> None:
    if actual != expected:
        raise WeightsError(
            f"{_name(manifest, path)}: checksum {actual}, the manifest says {expected}; the file"
            " is torn or was changed: publish the version again"
        )


def _name(manifest: Manifest, path: Path) -> str:
    return f"weights version {manifest.version}, {path}"
