"""The messages between the roles: msgspec structs, sent as MessagePack over ZeroMQ sockets.

Each message is one MessagePack map with a `type` tag. `Hello` carries `PROTOCOL`; a peer with
another protocol version is refused. Arrays are little-endian bytes. Each arrives once and in order
(`delivery`), also over connections that are cut.

    trainer rank 0  <-- DEALER/ROUTER -->  orchestrator  <-- ROUTER/DEALER -->  generators, stores
"""

# ruff: noqa: F405 - the parts are used and passed on
from collections.abc import Callable
from typing import Any, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from megatron_rl.message_parts import *  # noqa: F403

PROTOCOL = 8
TRAINER = "trainer"
"""Socket identity of trainer rank 0; the other ranks are `trainer-1`, ..., generators `generator-0`
or, if they joined by themselves, `generator-<host>-<number>`, stores `store-<node>` and, on the
trainer's nodes, `trainer-store-<node>`."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all messages."""


# ---------------------------------------------------------------- orchestrator -> store
class TakeVersion(Message):
    """Take a version from these sources; the answers are `StoreMemory` and `VersionTaken`.

    Without sources, or with other ones during a transfer, it names the version or replaces them.
    """

    manifest: Manifest
    sources: tuple[StoreSource, ...] = ()


# ---------------------------------------------------------------- store -> orchestrator
class StoreMemory(Message):
    """The memory of a store is mapped and registered: it can be a source from now on."""

    source: StoreSource


class VersionTaken(Message):
    """Every bucket of the version is in the store, and its checksum is right."""

    version: int
    seconds: float  # since it was first named
    num_bytes: dict[str, int]  # bytes read from each source, by its name


class SourceFailed(Message):
    """A source cannot be used any more; the store waits for another `TakeVersion`."""

    version: int
    source: str
    reason: str


# ---------------------------------------------------------------- orchestrator -> generator
class Generate(Message):
    """Sample completions of one prompt; the answer is one `Sample` per completion.

    Of a completion that grows long, a `Grown` comes about every `fleet.report_tokens` tokens.
    """

    group: int  # group index in dispatch order (training), or prompt index (evaluation)
    prompt_id: int
    prompt: list[int]  # token ids, including the marker that opens thinking
    limits: list[TurnLimits]  # of the turns of each completion
    indices: list[int]  # `Sample.index` of each completion
    temperature: float
    task: str = ""  # task of the prompt, whose `rollout` makes the completions
    row: dict[str, Any] = {}  # for several turns: `messages` of the question, `gold`, `meta`
    evaluation: int = -1  # weight version under evaluation; -1 for training
    begun: dict[int, Partial] = {}  # by index: another generator had begun them; go on with them


class UpdateWeights(Message):
    """Swap to these weights in flight; the answer is `WeightsUpdated`."""

    manifest: Manifest
    folder: str  # store on the generator's node that has all buckets; empty: the trainer's stores


class ScoreRequest(Message):
    """Compute log-probs of given completions under the current weights; the answer is `Scores`."""

    step: int
    prompts: list[list[int]]
    completions: list[list[int]]


class Stop(Message):
    """Exit cleanly."""


class Welcome(Message):
    """The answer to `Join`."""

    config: dict[str, Any]  # the run's resolved configuration
    model_dir: str  # Hugging Face directory of weights version 0
    trainer_node: str  # node whose processes see every trainer rank's store; empty if no node does


# ---------------------------------------------------------------- generator -> orchestrator
class Join(Message):
    """The first message of a generator, in every conversation; the answer is `Welcome`.

    `Hello` follows once its engine runs.
    """

    process: str  # its place, for messages: `process 123 on host`
    supervised: bool  # True if a rank of torchrun restarts it when it ends
    protocol: int = PROTOCOL


class Hello(Message):
    """A peer is ready; the first message of every other role."""

    role: str  # trainer, trainer-rank (ranks after the first), generator, store or trainer-store
    rank: int
    version: int  # that the peer holds; one of another incarnation of the run does not count
    node: str = ""  # of the peer, one for all that share its memory (`weights.store.node_name`)
    folder: str = ""  # of a store that takes versions for the generators of its node
    protocol: int = PROTOCOL
    capacity: int = 0  # concurrent completions (generators)
    active_parameters: int = 0  # active parameters per token (trainer), for FLOPs
    max_logprob_error: float = 0.0  # `metrics.max_logprob_error` or its default (trainer) [nats]


class Sample(Message):
    """One completion with the token ids of the engine (never re-encoded)."""

    group: int
    index: int  # position in the group, 0 to G - 1
    prompt_id: int
    evaluation: int
    token_ids: bytes  # int32 [tokens]
    logprobs: bytes  # float32 [tokens]: the generator's at sampling time; 0 if not sampled
    segments: list[Segment]  # origin of each token; they cover the completion without gaps
    spans: list[VersionSpan]  # weight version of each token; they cover it without gaps
    finish_reason: str  # `stop`, or `length` if truncated
    verdict: tuple[str, str, float | None] | None = None
    """`rewards.Outcome`, reason and reward by an environment; None: the task's verifier judges."""
    turn_rewards: list[float] = []  # the environment's of each turn: parts of that of the whole
    routes: list[bytes] = []
    """For `algorithm.routing_replay`: routed experts (`models.routed_experts`) of each sequence."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the completion, of all origins."""
        return len(self.token_ids) // 4

    @property
    def own_tokens(self) -> int:
        """Tokens of the policy's turns, with what was forced into them."""
        return self.count("sampled") + self.count("forced")

    def count(self, kind: Origin) -> int:
        """Return the number of tokens of an origin."""
        return sum(s.end - s.start for s in self.segments if s.kind == kind)

    def sampled(self) -> NDArray[np.bool_]:
        """Return [tokens]: True for the tokens that the policy sampled."""
        mask = np.zeros(self.num_tokens, dtype=bool)
        for segment in self.segments:
            mask[segment.start : segment.end] = segment.kind == "sampled"
        return mask

    @property
    def last_turn(self) -> bytes:
        """int32: ids of the policy's last turn, with what was forced into it."""
        start, end = (turn_ranges(self.segments) or [(0, 0)])[-1]
        return self.token_ids[4 * start : 4 * end]


class RolloutFailed(Message):
    """A rollout failed by its tools, its environment or its agent: it is no `Sample`."""

    group: int
    index: int
    prompt_id: int
    evaluation: int
    cause: str  # by which failures are counted
    reason: str


class Grown(Message):
    """More of a training completion that is not at its end yet."""

    group: int
    index: int
    start: int  # tokens that were told before
    rest: Partial  # ids and log-probs from `start` on; spans and forced range of the whole


class Leaving(Message):
    """The generator takes no more work; it gets `Stop` when its completions have arrived."""


class Left(Message):
    """The generator ends now; its completions are generated elsewhere."""


class WeightsUpdated(Message):
    """The generator decodes with `version` from now on."""

    version: int
    pause_seconds: float  # time without decoding
    transfer_seconds: float  # loading, part of the pause
    requests_in_flight: int


class Scores(Message):
    """The answer to `ScoreRequest`: log-probs of each completion under `version`."""

    step: int
    version: int
    logprobs: list[list[float]]


class GeneratorStats(Message):
    """Load of a generator, about once a second."""

    seconds: float  # interval that this message covers
    busy_seconds: float  # part of the interval with at least one request decoding
    tokens: int
    aborted: int  # requests that ended unfinished since the start (must stay 0)


class Failed(Message):
    """A role failed; the run stops with this error."""

    error: str


# ---------------------------------------------------------------- trainer <-> orchestrator
class BatchRequest(Message):
    """The trainer is ready for step `step`."""

    step: int


class Batch(Message):
    """All sequences of one optimizer step, flat, one entry per prompt or completion token.

    `loss_weights` carries all normalization: the trainer computes `sum(loss_weight * term)`.
    Prompt tokens and forced tokens have weight 0.

    Example: two sequences of 3 and 4 tokens: `bounds` = [0, 3, 7].
    """

    step: int
    bounds: bytes = bytes(4)  # int32 [sequences + 1]: i has tokens `[bounds[i], bounds[i+1])`
    prompt_lengths: bytes = b""  # int32 [sequences]
    prompt_ids: bytes = b""  # int32 [sequences]
    completion_indices: bytes = b""  # int32 [sequences]: `Sample.index`
    token_ids: bytes = b""  # int32 [tokens]
    advantages: bytes = b""  # float32 [tokens]
    generator_logprobs: bytes = b""  # float32 [tokens], 0 on prompts
    loss_weights: bytes = b""  # float32 [tokens]
    versions: bytes = b""  # int32 [tokens]: weight version, -1 on prompts and forced tokens
    probe: list[int] = []  # sequences whose log-probs the trainer returns (`StepDone`)
    routes: list[bytes] = []  # routed experts by sequence, or none: a bytes field ends at 4 GiB
    stop: bool = False  # all steps are trained; the batch is empty
    save: bool = False  # save a checkpoint before this step


class StepDone(Message):
    """Step `step` is done; the weights are version `step + 1` now."""

    step: int
    metrics: dict[str, float]  # sums and means over the batch, by the names of metrics.jsonl
    probe_logprobs: list[list[float]]  # of each sequence of `Batch.probe`, under weights `step`
    wait_seconds: float  # wait for the batch
    train_seconds: float  # forward, backward and optimizer step
    ratios: bytes = b""
    """float32 [completion tokens of the batch]: exp(trainer - generator) log-prob of each, if
    rollout files have them (`metrics.rollouts_ratios`)."""
    entropies: bytes = b""
    """As `ratios`: entropy of the trainer's distribution at each token [nats]."""


class Published(Message):
    """A weight version that generators can load."""

    manifest: Manifest
    seconds: float


class BatchSkipped(Message):
    """The groups of step `step` taught nothing; its batch will be of the next ones."""

    step: int


class SaveState(Message):
    """Write the orchestrator's state of `step` into `directory`; the answer is `StateSaved`."""

    step: int
    directory: str


class StateSaved(Message):
    """The orchestrator's state of `step` is written."""

    step: int


class TrainerDone(Message):
    """The trainer ends, after its last step or by an interrupt."""

    step: int
    interrupted: bool


# Every class above: the tag tells them apart.
AnyMessage: Any = Union[tuple(Message.__subclasses__())]  # noqa: UP007 - not a fixed list

encode: Callable[[Message], bytes] = msgspec.msgpack.encode
decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(AnyMessage).decode
"""Return the message of these bytes, or raise msgspec.DecodeError."""
