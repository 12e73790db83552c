"""The orchestrator's view of the stores: who takes which weight version from whom.

Each node of generators without a view of the trainer's stores has a store of its own. The healthy
ones form a tree in the order in which they joined: the first two take from the trainer's stores,
store `i` from store `(i - 2) // 2`. A store works on one version at a time and then takes the
newest, so slow ones skip versions.

A source that a store reports is suspect: no store takes from it until it completes a later version
or joins again. The reporter gets another source: a store that has the version complete, else one
that takes it and does not wait for the reporter, else the trainer's stores.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.orchestrator import RunError
from megatron_rl.orchestrator.generators import NO_VERSION, Generators, unreachable

GRACE_SECONDS = 30.0  # wait for a store's own error after `timeouts.transfer_seconds`
RETRY_SECONDS = 1.0  # before a store uses the trainer's stores again that failed for it


@dataclass(slots=True, eq=False)
class StoreState:
    """A store that has said hello; another hello makes it a new one."""

    name: str
    node: str
    folder: str
    memory: m.StoreSource | None = None  # set once its memory is mapped; only then is it a source
    complete: list[int] = field(default_factory=list)  # versions, at most two, in ascending order
    taking: m.Manifest | None = None  # named and not complete; of a trainer's store, the last named
    named_at: float = 0.0
    sources: tuple[m.StoreSource, ...] = ()
    sources_at: float | None = None  # time of the first sources of this version
    failed: dict[str, float] = field(default_factory=dict)  # source -> time, for this version
    suspect: int | None = None  # version for which another store reported it; None: healthy


class Stores:
    """The stores of a run, the trainer's included; a run on one node has none."""

    def __init__(self, config: RunConfig) -> None:
        self._timeouts = config.timeouts
        self._stores: dict[str, StoreState] = {}  # in the order in which they joined
        self._trainer: dict[str, StoreState] = {}  # by node
        self._by_node: dict[str, StoreState] = {}
        self._manifest: m.Manifest | None = None
        self._published_at: dict[int, float] = {}
        self._bare_since: dict[str, float] = {}
        self.readable_from = 0  # the trainer's stores may overwrite versions before this one

    def __iter__(self) -> Iterator[StoreState]:
        return iter((*self._trainer.values(), *self._stores.values()))

    def __contains__(self, name: str) -> bool:
        return any(store.name == name for store in self)

    def __getitem__(self, name: str) -> StoreState:
        return next(store for store in self if store.name == name)

    @property
    def newest(self) -> int:
        """The newest version that was announced."""
        return NO_VERSION if self._manifest is None else self._manifest.version

    @property
    def versions(self) -> set[int]:
        """Versions that generators' stores hold or take."""
        taken = {store.taking.version for store in self._stores.values() if store.taking}
        return taken.union(*(store.complete for store in self._stores.values()))

    def oldest_taken(self) -> int | None:
        """Return the oldest version that a store still takes."""
        return min((s.taking.version for s in self._stores.values() if s.taking), default=None)

    def folder(self, manifest: m.Manifest, node: str) -> str | None:
        """Return the folder from which a node can load a version, "" for the trainer's; or None."""
        if _is_direct(manifest, node):
            return "" if manifest.version >= self.readable_from else None
        store = self._by_node.get(node)
        return store.folder if store and manifest.version in store.complete else None

    def add(self, name: str, hello: m.Hello) -> None:
        """Add a store, without memory or versions; one that joins again is the newest."""
        store = StoreState(name, hello.node, hello.folder)
        if hello.role == "trainer-store":
            self._trainer[hello.node] = store
        else:
            self._stores.pop(name, None)
            self._stores[name] = self._by_node[hello.node] = store
        for other in self._stores.values():
            other.failed.pop(name, None)

    def publish(self, manifest: m.Manifest) -> None:
        """Note the newest version, which is complete in the trainer's stores."""
        held = {v: t for v, t in self._published_at.items() if v in self.versions}
        self._published_at = held | {manifest.version: time.monotonic()}
        self._manifest = manifest

    def batch_given(self, step: int) -> None:
        """Note that versions before `step` are not in the trainer's stores for much longer."""
        self.readable_from = step

    def mapped(self, name: str, source: m.StoreSource) -> None:
        """Note the memory of a store.

        Raises:
            RunError: the store has not said hello.
        """
        self[name].memory = source

    def taken(self, name: str, message: m.VersionTaken) -> tuple[float, int]:
        """Note a complete version, unless the store has joined again since it was asked for it.

        Returns (seconds since its announcement, bytes that came from the trainer's stores).
        """
        store, version = self[name], message.version
        if _takes(store, version):
            store.complete = sorted([*store.complete, version])
            store.taking, store.sources = None, ()
        if store.suspect is not None and version > store.suspect:
            store.suspect = None
        trainers = {s.name for s in self._trainer.values()}
        num_bytes = sum(n for source, n in message.num_bytes.items() if source in trainers)
        return time.monotonic() - self._published_at.get(version, time.monotonic()), num_bytes

    def failed(self, name: str, message: m.SourceFailed) -> str:
        """Put a source out of the tree and return a line that names it and the reason."""
        store = self[name]
        given = next((s for s in store.sources if s.name == message.source), None)
        source = self._stores.get(message.source)
        if given is not None:
            store.sources = ()
            if source is None or source.memory == given:  # else it has joined again since
                store.failed[message.source] = time.monotonic()
                if source is not None:
                    source.suspect = max(message.version, source.suspect or 0)
        return (
            f"{name} cannot take weights version {message.version} from {message.source}:"
            f" {message.reason}; it takes them from another store"
        )

    def requests(
        self, generators: Generators, keep: set[int]
    ) -> Iterator[tuple[str, m.TakeVersion]]:
        """Yield what can be sent now, with the receivers; generators skip no version of `keep`."""
        manifest, now = self._manifest, time.monotonic()
        if manifest is None or not manifest.nodes:
            return
        for store in self._trainer.values():
            if store.taking is not manifest:
                store.named_at = store.named_at or now
                store.taking = manifest
                yield store.name, m.TakeVersion(manifest=manifest)
        stores = sorted(self._stores.values(), key=lambda s: s.suspect is not None)
        healthy = [store for store in stores if store.suspect is None]
        for index, store in enumerate(stores):
            index = min(index, len(healthy))
            parent = healthy[(index - 2) // 2] if index >= 2 else None
            if store.taking is None:
                store.taking = self._next_version(store, generators, keep)
                if store.taking is None:
                    continue
                store.complete = store.complete[-1:]  # the other slot is overwritten
                store.named_at, store.sources_at = now, None
                store.failed.clear()
                if store.memory is None:
                    yield store.name, m.TakeVersion(manifest=store.taking)
            if store.memory is not None and not store.sources:
                store.sources = self._sources(store, store.taking, parent)
                if store.sources:
                    store.sources_at = store.sources_at or now
                    yield store.name, m.TakeVersion(manifest=store.taking, sources=store.sources)

    def _next_version(
        self, store: StoreState, generators: Generators, keep: set[int]
    ) -> m.Manifest | None:
        assert self._manifest is not None
        if _is_direct(self._manifest, store.node):
            return None
        if generators.loading(store.node) & set(store.complete[:-1]):
            return None  # from the slot that would be overwritten
        for manifest in (*generators.unread(store.node, keep), self._manifest):
            if manifest.version not in store.complete and manifest.version >= self.readable_from:
                return manifest
        return None

    def _sources(
        self, store: StoreState, manifest: m.Manifest, parent: StoreState | None
    ) -> tuple[m.StoreSource, ...]:
        """Return the sources of a store with this parent in the tree; empty if it has to wait."""
        version = manifest.version
        healthy = [s for s in self._stores.values() if s is not store and s.suspect is None]
        others = [s for s in healthy if s.name not in store.failed]
        pool = [s for s in others if version in s.complete]
        if not pool and (parent is not None or store.failed):
            pool = [s for s in others if _takes(s, version) and not self._awaits(s, store, version)]
        if not pool:
            return self._trainer_sources(store, manifest)
        children = Counter(source.name for s in self._stores.values() for source in s.sources)
        best = min(pool, key=lambda s: (s is not parent, children[s.name]))
        return () if best.memory is None else (best.memory,)

    def _awaits(self, store: StoreState, other: StoreState, version: int) -> bool:
        """Return True if a store takes a version through another one."""
        source: StoreState | None = store
        while source is not None and _takes(source, version) and source.sources:
            if source.sources[0].name == other.name:
                return True
            source = self._stores.get(source.sources[0].name)
        return False

    def _trainer_sources(
        self, store: StoreState, manifest: m.Manifest
    ) -> tuple[m.StoreSource, ...]:
        states = [self._trainer.get(node) for node in manifest.nodes]
        memories = [state.memory for state in states if state is not None and state.memory]
        if len(memories) < len(states):
            return ()
        failed_at = max((store.failed.get(s.name, -RETRY_SECONDS) for s in memories), default=0.0)
        return tuple(memories) if time.monotonic() >= failed_at + RETRY_SECONDS else ()

    def remove(self, name: str) -> None:
        """Take a lost store out; those that take from it get other sources."""
        store = self._stores.pop(name)
        if self._by_node.get(store.node) is store:
            del self._by_node[store.node]
        for other in self._stores.values():
            if any(source.name == name for source in other.sources):
                other.sources = ()

    def check(
        self, now: float, last_frame: Mapping[str, float], closed: Mapping[str, float]
    ) -> list[tuple[str, str]]:
        """Return the generators' stores that are lost, each with the reason (`Generators.check`).

        Raises:
            RunError: a store of the trainer is late.
        """
        startup = self._timeouts.startup_seconds
        within = f"within timeouts.startup_seconds = {startup:g}"
        for store in self._trainer.values():
            if store.memory is None and store.taking and now - store.named_at > startup:
                raise RunError(f"{store.name} has not mapped its memory {within}: see its log")
        lost = []
        for store in self._stores.values():
            silent, closed_for = (now - at.get(store.name, now) for at in (last_frame, closed))
            reason = unreachable(silent, closed_for, self._timeouts)
            if reason := reason or self._lateness(store, now, within):
                lost.append((store.name, reason))
        return lost

    def bare_nodes(self, now: float, nodes: set[str]) -> list[str]:
        """Return the nodes, of those of generators, that have had no store for too long."""
        if self._manifest is None:
            return []
        bare = {n for n in nodes - self._by_node.keys() if not _is_direct(self._manifest, n)}
        self._bare_since = {node: self._bare_since.get(node, now) for node in bare}
        limit = self._timeouts.startup_seconds
        return sorted(node for node, since in self._bare_since.items() if now - since > limit)

    def _lateness(self, store: StoreState, now: float, within: str) -> str:
        """Return what is late about a store; "" if nothing is."""
        if store.taking is None:
            return ""
        startup, transfer = self._timeouts.startup_seconds, self._timeouts.transfer_seconds
        version = store.taking.version
        if store.memory is None and now - store.named_at > startup:
            return f"it has not mapped its memory {within}"
        if store.sources_at is None:
            if now - store.named_at > startup:
                lacking = ", ".join(n for n in store.taking.nodes if n not in self._trainer)
                why = f"the trainer's nodes {lacking} have no store process; see their logs"
                raise RunError(
                    f"{store.name} has no source of weights version {version} {within}:"
                    f" {why if lacking else 'no other store can serve it'}"
                )
        elif now - store.sources_at > transfer + GRACE_SECONDS:
            sources = ", ".join(s.name for s in store.sources) or "none"
            return (
                f"it has not taken weights version {version} within timeouts.transfer_seconds ="
                f" {transfer:g}; its sources are {sources}: see their logs, or raise the limit"
            )
        return ""


def _takes(store: StoreState, version: int) -> bool:
    return store.taking is not None and store.taking.version == version


def _is_direct(manifest: m.Manifest, node: str) -> bool:
    """Return True if generators of a node read the trainer's own stores."""
    return manifest.nodes in ((), (node,))
