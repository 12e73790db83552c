"""The orchestrator's view of the generators: versions held, work in flight, pending updates."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_rl.config import RunConfig
from megatron_rl.messages import Manifest
from megatron_rl.orchestrator import RunError

NO_VERSION = -1
SILENCE_SECONDS = 120.0


@dataclass(slots=True)
class GeneratorState:
    """A generator; it gets work once it acknowledged a version, which the trainer then has."""

    name: str
    """`generator-<number>`."""
    capacity: int
    """Concurrent completions."""
    version: int = NO_VERSION
    in_flight: int = 0
    """Completions dispatched and not returned."""
    updating: Manifest | None = None
    """Version that was sent and is not acknowledged."""
    pending: deque[Manifest] = field(default_factory=deque)
    evaluations_left: int = 0
    """Evaluation completions not returned; until then updates wait."""
    last_message: float = field(default_factory=time.monotonic)

    @property
    def number(self) -> int:
        """The generator's number, from 0."""
        return int(self.name.rpartition("-")[2])

    def offer(self, manifest: Manifest, keep: set[int]) -> None:
        """Queue a version; drop older pending ones unless they are in `keep`."""
        self.pending = deque(m for m in self.pending if m.version in keep)
        self.pending.append(manifest)

    def next_update(self) -> Manifest | None:
        """Start the next update and return its version, or None."""
        if self.updating is not None or self.evaluations_left or not self.pending:
            return None
        self.updating = self.pending.popleft()
        return self.updating


class Generators:
    """The generators that have said hello, and the weight versions that are kept for them."""

    def __init__(self, config: RunConfig) -> None:
        self._expected, self._timeouts = config.roles.engines, config.timeouts
        self._states: dict[str, GeneratorState] = {}
        self._manifests: dict[int, Manifest] = {}
        self._started = time.monotonic()

    def __iter__(self) -> Iterator[GeneratorState]:
        return iter(self._states.values())

    def __getitem__(self, name: str) -> GeneratorState:
        return self._states[name]

    @property
    def all_up(self) -> bool:
        """True once every generator of the run has said hello."""
        return len(self._states) == self._expected

    def add(self, name: str, capacity: int, keep: set[int]) -> GeneratorState:
        """Add a generator and offer it the versions published so far."""
        generator = self._states[name] = GeneratorState(name, capacity)
        for manifest in self._manifests.values():  # in the order of their versions
            generator.offer(manifest, keep)
        return generator

    def publish(self, manifest: Manifest, keep: set[int]) -> None:
        """Offer a version to all generators; forget older ones unless they are in `keep`."""
        self._manifests = {v: x for v, x in self._manifests.items() if v in keep}
        self._manifests[manifest.version] = manifest
        for generator in self:
            generator.offer(manifest, keep)

    def oldest_needed(self) -> int:
        """Return the oldest version whose bytes a generator may still read."""
        unread = [m for g in self for m in (g.updating, *g.pending) if m is not None]
        needed = [m.version for m in unread]
        if not self.all_up:
            needed.extend(self._manifests)
        return min(needed, default=max(self._manifests, default=0))

    def free(self, oldest_version: int) -> GeneratorState | None:
        """Return the least busy generator that may sample, or None if all are full or too old."""
        free = [
            g
            for g in self
            if g.version != NO_VERSION and oldest_version <= g.version and g.in_flight < g.capacity
        ]
        return min(free, key=lambda g: g.in_flight, default=None)

    def message_from(self, name: str) -> None:
        """Note that a peer is alive."""
        if name in self._states:
            self._states[name].last_message = time.monotonic()

    def check(self, now: float) -> None:
        """Raise RunError if a generator did not come up or fell silent."""
        startup = self._timeouts.startup_seconds
        limit = max(SILENCE_SECONDS, self._timeouts.transfer_seconds)
        if not self.all_up and now - self._started > startup:
            raise RunError(
                f"{len(self._states)} of {self._expected} generators are up after"
                f" timeouts.startup_seconds = {startup}"
            )
        for generator in self:
            if self.all_up and now - generator.last_message > limit:
                raise RunError(f"{generator.name} has been silent for {limit:.0f} s")
