"""The orchestrator's view of the generators: who is a member, versions held, work, updates.

    joining  ──► healthy ◄──► suspect           `join`, `hello`, `check`
                    │            │
                 leaving ────────┴──► gone      `Membership` takes it out (`remove`)

A generator joins when its process starts and is healthy once its engine has loaded a version of
this incarnation of the run. A suspect one gets no new work: its connection is closed, or it has
been silent for a while. Nothing here waits or sends: every method is given the time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatron_rl.config import RunConfig, Timeouts
from megatron_rl.messages import Manifest, UpdateWeights
from megatron_rl.orchestrator import RunError

NO_VERSION = -1
CLOSED_SECONDS = 3.0  # without a connection a peer is lost then: one that lives reconnects at once
SUSPECT_SHARE = 1 / 3  # of `timeouts.silence_seconds`
ACKNOWLEDGE_SECONDS = 30.0  # wait for a generator's own error after `timeouts.transfer_seconds`
_PAUSE_SECONDS = 5.0

WorkKey = tuple[int, int]  # (evaluated version, prompt) of an evaluation, (-1, group) of training


def unreachable(silent: float, closed: float, timeouts: Timeouts) -> str:
    """Return why a peer, silent and without a connection for so long, is lost; "": it is not."""
    if closed > CLOSED_SECONDS:
        return "its connection closed"
    late = silent > timeouts.silence_seconds
    return f"it was silent for {silent:.0f} s (timeouts.silence_seconds)" if late else ""


@dataclass(slots=True, eq=False)
class GeneratorState:
    """A generator; it gets work once it acknowledged a version, which the trainer then has."""

    name: str  # `generator-<number>`, or `generator-<host>-<number>`
    process: str  # its place, for messages
    supervised: bool  # True if a rank of torchrun restarts it
    joined_at: float
    heard_at: float  # time of the last message, or of any sign of life while it joins
    node: str = ""  # node whose files it sees
    capacity: int = 0  # concurrent completions; 0 until its engine runs
    standing: Literal["joining", "healthy", "suspect", "leaving"] = "joining"
    version: int = NO_VERSION
    updating: int | None = None  # version that was sent and is not acknowledged
    updating_since: float = 0.0
    evaluating: int | None = None  # version at which it is held for an evaluation
    # Completions dispatched and not returned, by their indices.
    work: dict[WorkKey, set[int]] = field(default_factory=lambda: defaultdict(set))
    in_flight: int = 0  # their number
    evaluations_left: int = 0  # those of evaluations

    @property
    def takes_work(self) -> bool:
        """True if it may get completions."""
        return self.standing == "healthy"

    def reads(self, version: int) -> bool:
        """Return True if it decodes with a version, and loads no other."""
        return self.takes_work and self.version == version and self.updating is None

    def give(self, key: WorkKey, indices: list[int]) -> None:
        """Note dispatched completions."""
        self.work[key].update(indices)
        self.in_flight += len(indices)
        self.evaluations_left += len(indices) * (key[0] >= 0)

    def took(self, key: WorkKey, index: int) -> bool:
        """Note a returned completion; False if it is none of the dispatched ones."""
        if index not in self.work.get(key, ()):
            return False
        self.work[key].discard(index)
        if not self.work[key]:
            del self.work[key]
        self.in_flight -= 1
        self.evaluations_left -= key[0] >= 0
        return True

    def act(self) -> str:
        """Return what it did last, in a few words."""
        if self.standing == "joining" and not self.capacity:
            return "its engine was starting"
        if self.updating is not None:
            return f"it was loading weights version {self.updating}"
        what = "an evaluation" if self.evaluations_left else "training"
        work = f"had {self.in_flight} completions of {what} in work"
        return f"it {work if self.in_flight else 'was waiting'} at version {self.version}"


class Generators:
    """The members of the fleet, and the weight versions that they may still load."""

    def __init__(self, config: RunConfig) -> None:
        self.expected, self._timeouts = config.roles.engines, config.timeouts
        self._states: dict[str, GeneratorState] = {}
        self._ready: list[GeneratorState] | None = None
        self._manifests: dict[int, Manifest] = {}  # in the order of their versions
        self._checked: float | None = None
        self.all_came = self.expected == 0  # True once as many as the run started were ready

    def __iter__(self) -> Iterator[GeneratorState]:
        return iter(self._states.values())

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def __getitem__(self, name: str) -> GeneratorState:
        return self._states[name]

    @property
    def ready(self) -> list[GeneratorState]:
        """Members with a running engine that do not leave."""
        if self._ready is None:
            self._ready = [g for g in self if g.capacity and g.standing != "leaving"]
        return self._ready

    @property
    def size(self) -> int:
        """Number of ready members; at least those that the run started, until they have come."""
        return max(len(self.ready), 0 if self.all_came else self.expected)

    @property
    def nodes(self) -> set[str]:
        """Nodes of the generators."""
        return {g.node for g in self if g.capacity}

    @property
    def evaluation_share(self) -> float:
        """Fraction of the completions in flight that are of evaluations."""
        left = sum(g.evaluations_left for g in self)
        return left / sum(g.in_flight for g in self) if left else 0.0

    def join(self, name: str, process: str, supervised: bool, now: float) -> None:
        """Add a generator whose engine is yet to start, or to load a version of this run."""
        self._states[name] = GeneratorState(name, process, supervised, now, now)
        self._ready = None

    def hello(self, name: str, node: str, capacity: int) -> GeneratorState:
        """Note that a generator's engine runs."""
        state = self._states[name]
        state.node, state.capacity, self._ready = node, capacity, None
        self.all_came |= len(self.ready) >= self.expected
        return state

    def leave(self, name: str) -> None:
        """Note that a member takes no more work."""
        self._states[name].standing, self._ready = "leaving", None

    def remove(self, name: str) -> GeneratorState:
        """Take a member out and return it, with the work that it had."""
        self._ready = None
        return self._states.pop(name)

    def message_from(self, name: str, now: float) -> None:
        """Note that a member is alive."""
        if name in self._states:
            self._states[name].heard_at = now

    def check(
        self, now: float, last_frame: Mapping[str, float], closed: Mapping[str, float]
    ) -> list[tuple[GeneratorState, str]]:
        """Update every member's standing; return those that are lost, each with the reason.

        `last_frame` is the time of each peer's last frame, `closed` the time since which a peer has
        no connection. Time in which this process itself did not run is no silence of theirs.
        """
        if self._checked is not None and (pause := now - self._checked) > _PAUSE_SECONDS:
            for g in self:
                g.heard_at, g.updating_since = g.heard_at + pause, g.updating_since + pause
        self._checked = now
        lost = []
        for g in self:
            if not g.capacity:
                g.heard_at = max(g.heard_at, last_frame.get(g.name, g.heard_at))
            silent, closed_for = now - g.heard_at, now - closed.get(g.name, now)
            reason = unreachable(silent, closed_for, self._timeouts)
            if reason := reason or self._lateness(g, now):
                lost.append((g, reason))
            elif g.standing in ("healthy", "suspect"):
                suspect = silent > SUSPECT_SHARE * self._timeouts.silence_seconds
                suspect |= g.name in closed
                g.standing = "suspect" if suspect else "healthy"
        return lost

    def _lateness(self, g: GeneratorState, now: float) -> str:
        """Return what is late about a member; "" if nothing is."""
        startup, transfer = self._timeouts.startup_seconds, self._timeouts.transfer_seconds
        if not g.capacity and now - g.joined_at > startup:
            return f"its engine did not start within timeouts.startup_seconds = {startup:g}"
        if g.updating is not None and now - g.updating_since > transfer + ACKNOWLEDGE_SECONDS:
            return (
                f"it has not loaded weights version {g.updating} within timeouts.transfer_seconds ="
                f" {transfer:g}"
            )
        return ""

    def publish(self, manifest: Manifest, keep: set[int]) -> None:
        """Add a version; forget older ones unless they are in `keep`."""
        self._manifests = {v: x for v, x in self._manifests.items() if v in keep}
        self._manifests[manifest.version] = manifest

    def updates(
        self, keep: set[int], folder: Callable[[Manifest, str], str | None], now: float
    ) -> Iterator[tuple[str, UpdateWeights]]:
        """Start the updates that are possible now, and yield them with the generators' names.

        A generator gets the newest version that can be loaded on its node (`Stores.folder`); it
        skips no version of `keep`, and one that is held for an evaluation gets none.
        """
        for g in self.ready:
            if g.updating is not None or g.evaluating is not None:
                continue
            ahead = [v for v in self._manifests if v > g.version]
            kept = next((i for i, v in enumerate(ahead) if v in keep), len(ahead))
            for version in reversed(ahead[: kept + 1]):
                manifest = self._manifests[version]
                if (path := folder(manifest, g.node)) is not None:
                    g.updating, g.updating_since = version, now
                    yield g.name, UpdateWeights(manifest=manifest, folder=path)
                    break

    def updated(self, name: str, version: int) -> bool:
        """Note an acknowledged version; True: it is the first, with which the member is healthy."""
        g = self._states[name]
        if g.updating != version:
            raise RunError(f"{name} acknowledged version {version}, which was not sent")
        is_first = g.standing == "joining"
        g.updating, g.version = None, version
        g.standing = "healthy" if is_first else g.standing
        return is_first

    def unread(self, node: str, keep: set[int]) -> list[Manifest]:
        """Return the versions of `keep` that generators of a node have yet to load."""
        held = [g.version for g in self.ready if g.node == node]
        return [x for v, x in self._manifests.items() if v in keep and any(v > h for h in held)]

    def loading(self, node: str) -> set[int]:
        """Return the versions that generators of a node load now."""
        return {g.updating for g in self if g.updating is not None and g.node == node}

    def oldest_read(self, keep: set[int]) -> int | None:
        """Return the oldest version that a generator loads, or of `keep`, which one has to load."""
        loading = {g.updating for g in self if g.updating is not None}
        return min(loading | (keep & self._manifests.keys()), default=None)

    def free(self, oldest_version: int) -> GeneratorState | None:
        """Return the least busy generator that may sample, or None if all are full or too old."""
        oldest = max(oldest_version, NO_VERSION + 1)
        able = (g for g in self if g.takes_work and g.version >= oldest)
        free = (g for g in able if g.in_flight < g.capacity)
        return min(free, key=lambda g: g.in_flight, default=None)
