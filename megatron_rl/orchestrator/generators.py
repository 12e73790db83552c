"""The orchestrator's view of the generators: versions held, work in flight, the next update."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megatron_rl.config import RunConfig
from megatron_rl.messages import Manifest, UpdateWeights
from megatron_rl.orchestrator import RunError

NO_VERSION = -1
SILENCE_SECONDS = 120.0


@dataclass(slots=True)
class GeneratorState:
    """A generator; it gets work once it acknowledged a version, which the trainer then has."""

    name: str
    """`generator-<number>`."""
    node: str
    """Node whose files it sees."""
    capacity: int
    """Concurrent completions."""
    version: int = NO_VERSION
    in_flight: int = 0
    """Completions dispatched and not returned."""
    updating: int | None = None
    """Version that was sent and is not acknowledged."""
    evaluations_left: int = 0
    """Evaluation completions not returned; until then updates wait."""
    last_message: float = field(default_factory=time.monotonic)


class Generators:
    """The generators that have said hello, and the weight versions that they may still load."""

    def __init__(self, config: RunConfig) -> None:
        self._expected, self._timeouts = config.roles.engines, config.timeouts
        self._states: dict[str, GeneratorState] = {}
        self._by_node: dict[str, list[GeneratorState]] = {}
        self._manifests: dict[int, Manifest] = {}  # in the order of their versions
        self._started = time.monotonic()

    def __iter__(self) -> Iterator[GeneratorState]:
        return iter(self._states.values())

    def __getitem__(self, name: str) -> GeneratorState:
        return self._states[name]

    @property
    def all_up(self) -> bool:
        """True once every generator of the run has said hello."""
        return len(self._states) == self._expected

    @property
    def nodes(self) -> set[str]:
        """Nodes of the generators."""
        return set(self._by_node)

    @property
    def evaluation_share(self) -> float:
        """Fraction of the completions in flight that are of evaluations."""
        left = sum(g.evaluations_left for g in self)
        return left / sum(g.in_flight for g in self) if left else 0.0

    def add(self, name: str, node: str, capacity: int) -> GeneratorState:
        """Add a generator."""
        generator = self._states[name] = GeneratorState(name, node, capacity)
        self._by_node.setdefault(node, []).append(generator)
        return generator

    def publish(self, manifest: Manifest, keep: set[int]) -> None:
        """Add a version; forget older ones unless they are in `keep`."""
        self._manifests = {v: x for v, x in self._manifests.items() if v in keep}
        self._manifests[manifest.version] = manifest

    def updates(
        self, keep: set[int], folder: Callable[[Manifest, str], str | None]
    ) -> Iterator[tuple[str, UpdateWeights]]:
        """Start the updates that are possible now, and yield them with the generators' names.

        A generator gets the newest version that can be loaded on its node (`Stores.folder`); it
        skips no version of `keep`.
        """
        newest = max(self._manifests, default=NO_VERSION)
        for g in self:
            if g.updating is not None or g.evaluations_left or g.version >= newest:
                continue
            ahead = [v for v in self._manifests if v > g.version]
            kept = next((i for i, v in enumerate(ahead) if v in keep), len(ahead))
            for version in reversed(ahead[: kept + 1]):
                manifest = self._manifests[version]
                if (path := folder(manifest, g.node)) is not None:
                    g.updating = version
                    yield g.name, UpdateWeights(manifest=manifest, folder=path)
                    break

    def unread(self, node: str, keep: set[int]) -> list[Manifest]:
        """Return the versions of `keep` that generators of a node have yet to load."""
        held = [g.version for g in self._by_node.get(node, [])] if self.all_up else [NO_VERSION]
        return [x for v, x in self._manifests.items() if v in keep and any(v > h for h in held)]

    def loading(self, node: str) -> set[int]:
        """Return the versions that generators of a node load now."""
        return {g.updating for g in self._by_node.get(node, []) if g.updating is not None}

    def oldest_read(self, keep: set[int]) -> int | None:
        """Return the oldest version that a generator loads, or of `keep` that one has to load."""
        loading = {g.updating for g in self if g.updating is not None}
        unread = {x.version for node in self._by_node for x in self.unread(node, keep)}
        if not self.all_up:
            unread |= keep & self._manifests.keys()
        return min(loading | unread, default=None)

    def free(self, oldest_version: int) -> GeneratorState | None:
        """Return the least busy generator that may sample, or None if all are full or too old."""
        oldest = max(oldest_version, NO_VERSION + 1)
        free = [g for g in self if g.version >= oldest and g.in_flight < g.capacity]
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
