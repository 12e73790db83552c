"""What the roles say to each other: msgspec structs, MessagePack on ZeroMQ sockets.

Wire format: every message is one MessagePack map with a `type` tag; `PROTOCOL` is compared in
`Hello` and a peer of another version is refused. Arrays travel as little-endian bytes.

    trainer rank 0  <-- DEALER/ROUTER -->  orchestrator  <-- ROUTER/DEALER -->  generators
"""

from __future__ import annotations

from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

PROTOCOL = 2
TRAINER = "trainer"
"""Socket identity of trainer rank 0; engines are `generator-0`, `generator-1`, ..."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of everything that travels."""


# ---------------------------------------------------------------- weights


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a weight version, by its Hugging Face name."""

    name: str
    dtype: str
    """torch's name without the module: `float32`, `bfloat16`."""
    shape: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A weight version that is complete: written only after its last byte.

    Example: `Manifest(version=21, path="/dev/shm/run/v000021", buckets=("0.safetensors",), ...)`.
    """

    version: int
    """Optimizer steps that made these weights."""
    path: str
    """Folder that holds the buckets (transport `disk`); empty where they are sent on request."""
    buckets: tuple[str, ...]
    """Names of the buckets, in the order of the stream; file names on disk."""
    checksums: tuple[str, ...]
    """Hex checksum of each bucket; what it covers is the transport's to say."""
    tensors: tuple[TensorInfo, ...]
    """Every tensor of the version, in the order of the stream."""
    num_bytes: int
    transport: str = "disk"
    """`weights.transport` of the trainer that made it."""
    bucket_tensors: tuple[int, ...] = ()
    """Number of tensors in each bucket."""
    senders: tuple[int, ...] = ()
    """Trainer rank that sends each bucket (transport `nccl`)."""


# ---------------------------------------------------------------- orchestrator -> generator


class Generate(Message):
    """Sample completions of one prompt; each one is answered by a `Sample`."""

    group: int
    """Index of the group in dispatch order (training) or of the prompt (evaluation)."""
    prompt_id: int
    prompt: list[int]
    """Token ids; ends with the marker that opens thinking."""
    thinking_budgets: list[int]
    """Thinking tokens of each completion before interruption; its length is the group size."""
    answer_budget: int
    """Tokens for the answer after thinking ended."""
    temperature: float
    evaluation: int = -1
    """Step of the evaluation that this belongs to; -1 for training."""


class UpdateWeights(Message):
    """Swap to these weights in flight; answered by `WeightsUpdated`."""

    manifest: Manifest


class ScoreRequest(Message):
    """Log-probs of given completions under the weights held now; answered by `Scores`."""

    step: int
    prompts: list[list[int]]
    completions: list[list[int]]


class Stop(Message):
    """End cleanly."""


# ---------------------------------------------------------------- generator -> orchestrator


class Hello(Message):
    """First message of a peer on its socket."""

    role: str
    """`trainer` or `generator`."""
    rank: int
    version: int
    """Weight version held."""
    protocol: int = PROTOCOL
    capacity: int = 0
    """Completions decoding at once (generators)."""
    active_parameters: int = 0
    """Parameters that one token uses (trainer), for FLOPs."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Completion tokens `[start, end)` were made by weights `version`."""

    version: int
    start: int
    end: int


class Sample(Message):
    """One completion as the engine made it; ids are never re-encoded."""

    group: int
    index: int
    """Position in the group, 0 .. G-1."""
    prompt_id: int
    evaluation: int
    token_ids: list[int]
    logprobs: list[float]
    """Generator's log-prob of each token at sampling time."""
    forced: tuple[int, int]
    """Half-open range of tokens that were forced, not sampled; (0, 0) for none."""
    spans: list[VersionSpan]
    """Which version made which tokens; they cover the completion without gaps."""
    started_version: int
    """Version held when the prompt was prefilled."""
    finish_reason: str
    """`stop`, or `length` for a truncated completion."""
    routes: bytes = b""
    """Experts that each token of prompt and completion took (`models.routes`); empty without
    `algorithm.routing_replay`."""


class WeightsUpdated(Message):
    """The engine decodes with `version` now."""

    version: int
    pause_seconds: float
    """Time in which no token moved."""
    transfer_seconds: float
    """Loading (part of the pause); with files, reading and checking them once more as well."""
    requests_in_flight: int


class Scores(Message):
    """Answer to `ScoreRequest`: one list of log-probs per completion, under `version`."""

    step: int
    version: int
    logprobs: list[list[float]]


class GeneratorStats(Message):
    """Sent about once a second."""

    seconds: float
    """Time covered by this message."""
    busy_seconds: float
    """Part of it with at least one request decoding."""
    running: int
    tokens: int
    aborted: int
    """Requests that ended without being finished, since the start (must stay 0)."""


class Failed(Message):
    """A role cannot go on; the run stops with this text."""

    error: str


# ---------------------------------------------------------------- trainer <-> orchestrator


class BatchRequest(Message):
    """The trainer is ready to train step `step` (weights `step`)."""

    step: int


class Batch(Message):
    """All sequences of one optimizer step, flat, one entry per token (prompt and completion).

    `loss_weight` carries all normalisation: the trainer computes `sum(loss_weight * term)`.
    Prompt tokens, forced tokens and dropped completions have weight 0.

    Example: two sequences of 3 and 4 tokens: `bounds` = [0, 3, 7].
    """

    step: int
    bounds: bytes
    """int32 [sequences + 1]: sequence i is tokens `[bounds[i], bounds[i+1])`."""
    prompt_lengths: bytes
    """int32 [sequences]."""
    token_ids: bytes
    """int32 [tokens]."""
    advantages: bytes
    """float32 [tokens]."""
    generator_logprobs: bytes
    """float32 [tokens]: 0 on prompts."""
    loss_weights: bytes
    """float32 [tokens]."""
    versions: bytes
    """int32 [tokens]: weights that made the token, -1 on prompts and forced tokens."""
    probe: list[int]
    """Sequences whose trainer log-probs are wanted in `StepDone.probe_logprobs`."""
    routes: bytes = b""
    """`Sample.routes` of all sequences, one after the other."""
    stop: bool = False
    """No step is left to train (the other fields are empty)."""
    save: bool = False
    """Save a checkpoint before this step (the weights of `step`)."""
    versions_needed_from: int = 0
    """Generators will not read the bytes of versions below this one any more."""

    @classmethod
    def stopping(cls, step: int, versions_needed_from: int = 0) -> Self:
        """The batch that says no step is left."""
        return cls(
            step=step,
            bounds=np.zeros(1, dtype="<i4").tobytes(),
            prompt_lengths=b"",
            token_ids=b"",
            advantages=b"",
            generator_logprobs=b"",
            loss_weights=b"",
            versions=b"",
            probe=[],
            stop=True,
            versions_needed_from=versions_needed_from,
        )


class StepDone(Message):
    """Step `step` was applied: the weights are `step + 1` now."""

    step: int
    metrics: dict[str, float]
    """Sums and means over the whole batch, by the names of metrics.jsonl."""
    probe_logprobs: list[list[float]]
    """Completion log-probs under weights `step` for each sequence of `Batch.probe`."""
    wait_seconds: float
    """Time waited for the batch."""
    train_seconds: float
    """Forward, backward and optimizer."""
    publish_seconds: float = 0.0
    """Export of the previous version."""


class Published(Message):
    """Weights that generators can take."""

    manifest: Manifest
    seconds: float


class SaveState(Message):
    """Write the orchestrator's state of `step` into `directory`; answered by `StateSaved`."""

    step: int
    directory: str


class StateSaved(Message):
    step: int


class TrainerDone(Message):
    """The trainer ends: after its last step, or because it was interrupted."""

    step: int
    interrupted: bool


AnyMessage = (
    Generate
    | UpdateWeights
    | ScoreRequest
    | Stop
    | Hello
    | Sample
    | WeightsUpdated
    | Scores
    | GeneratorStats
    | Failed
    | BatchRequest
    | Batch
    | StepDone
    | Published
    | SaveState
    | StateSaved
    | TrainerDone
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> Any:
    """The message of these bytes.

    Raises:
        msgspec.ValidationError: not a message of this protocol.
    """
    return _decoder.decode(data)


def ints(data: bytes) -> NDArray[np.int32]:
    """The int32 array of a field."""
    return np.frombuffer(data, dtype="<i4")


def floats(data: bytes) -> NDArray[np.float32]:
    """The float32 array of a field."""
    return np.frombuffer(data, dtype="<f4")
