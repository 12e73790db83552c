"""Parts of messages: tokens of completions, weight versions, and the memory of stores."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

Origin = Literal["sampled", "forced", "given", "prompt"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Completion tokens `[start, end)` were sampled by weights `version`."""

    version: int
    start: int
    end: int


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `[start, end)` of a rollout have one origin; only sampled ones are trained.

    `sampled` by the policy, `forced` into its turn (an interruption), `given` by a tool or an
    environment, or `prompt`: the whole context of what follows it. A rollout whose first segment is
    no prompt follows its question's.
    """

    kind: Origin
    start: int
    end: int


def turn_ranges(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return the tokens `[start, end)` of each turn of the policy, with what was forced into it."""
    ranges: list[tuple[int, int]] = []
    own = False
    for s in segments:
        before, own = own, s.kind in ("sampled", "forced")
        if own:
            ranges.append((ranges.pop()[0] if before else s.start, s.end))
    return ranges


def sequence_ranges(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return the tokens `[start, end)` of each sequence of a rollout.

    A sequence begins with its own prompt, but the first one may follow the question's prompt.
    """
    starts = [0, *(s.start for s in segments if s.kind == "prompt" and s.start)]
    return list(pairwise([*starts, segments[-1].end])) if segments else []


class TurnLimits(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that the policy may sample in one turn."""

    thinking: int  # before the interruption
    answer: int  # after thinking has ended or was interrupted


class Partial(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a completion, as far as its generator had told it."""

    token_ids: bytes  # int32 [tokens]
    logprobs: bytes  # float32 [tokens]: log-prob of each token at sampling time
    spans: list[VersionSpan]  # weight version of each token, without gaps
    forced: tuple[int, int]  # half-open range of forced tokens; (0, 0) for none

    @property
    def num_tokens(self) -> int:
        """Tokens of the beginning."""
        return len(self.token_ids) // 4


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a weight version, by its Hugging Face name."""

    name: str
    dtype: str  # torch dtype without the module: `float32`, `bfloat16`
    shape: tuple[int, ...]


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that travel together, as flat bytes (`weights.buckets`)."""

    owner: int  # trainer rank whose memory has them
    tensors: tuple[TensorInfo, ...]
    num_bytes: int
    checksum: str  # hex xxh3-128 of the flat bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A complete weight version: announced only after its last byte is readable."""

    version: int  # optimizer steps behind these weights
    buckets: tuple[Bucket, ...]
    root: str  # folder on the trainer's nodes, with a store (`weights.store`) in `<root>/<owner>`
    nodes: tuple[str, ...]  # nodes that see it; empty if every node does (`weights.directory`)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def buckets_of(self, owner: int) -> list[int]:
        """Return the numbers of a trainer rank's buckets; -1: of all."""
        return [i for i, bucket in enumerate(self.buckets) if owner in (-1, bucket.owner)]

    @property
    def tensors(self) -> list[TensorInfo]:
        """All tensors, in the order of the buckets."""
        return [tensor for bucket in self.buckets for tensor in bucket.tensors]


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a store that peers read."""

    owner: int  # trainer rank whose buckets it has; -1: all buckets
    addresses: tuple[int, ...]  # of header, two slots, two differences (`weights.store.Store`)


class StoreSource(msgspec.Struct, frozen=True, array_like=True):
    """A store from which another one takes a version."""

    name: str  # the store process, `store-<node>` or `trainer-store-<node>`
    agent: bytes  # NIXL's description of the process and its memory
    regions: tuple[Region, ...]


def int_bytes(values: ArrayLike) -> bytes:
    """Return the field of int32 values."""
    return np.asarray(values, dtype="<i4").tobytes()


def float_bytes(values: ArrayLike) -> bytes:
    """Return the field of float32 values."""
    return np.asarray(values, dtype="<f4").tobytes()


def ints(data: bytes) -> NDArray[np.int32]:
    """Return a field as an int32 array."""
    return np.frombuffer(data, dtype="<i4")


def floats(data: bytes) -> NDArray[np.float32]:
    """Return a field as a float32 array."""
    return np.frombuffer(data, dtype="<f4")
