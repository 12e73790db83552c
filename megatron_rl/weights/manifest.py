"""The manifest of a weight version, checksums, and the checks that refuse a version."""

from collections.abc import Buffer, Mapping, Sequence

import xxhash

from megatron_rl.messages import TensorInfo


class WeightsError(RuntimeError):
    """A weight version that cannot be used; names version, file or tensor, and the remedy."""


def checksum(data: Buffer) -> str:
    """Return xxh3-128 of these bytes, in hex: it detects torn bytes, not an adversary."""
    return xxhash.xxh3_128_hexdigest(data)


def check_tensors(
    tensors: Sequence[TensorInfo], expected: Mapping[str, TensorInfo], version: int
) -> None:
    """Refuse a version whose tensors are not exactly those that the engine takes.

    These are the trained tensors of the checkpoint that it started from, by name, in the form in
    which they travel (`number_format.WireFormat.expected`).

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
        if info != (wanted := expected[name]):
            raise WeightsError(
                f"weights version {version}: {name} is {info.dtype} {list(info.shape)}, the engine"
                f" takes {wanted.dtype} {list(wanted.shape)}; give trainer and generators one model"
                " and one configuration (precision.params, weights.dtype, weights.quantization)"
            )
