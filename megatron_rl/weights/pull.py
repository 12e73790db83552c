"""Take one version from other stores, bucket by bucket, while they still receive it themselves.

A source's header tells which buckets it has. A bucket travels as the differences to what this store
holds, if the source has them, else whole. It is read into a buffer, compared with the checksum of
the manifest, and only then in the store, where it is readable by others at once. A source that is
lost, silent or wrong is reported by name and replaced by another, and nothing that came is lost.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.messages import Manifest, Region, StoreSource
from megatron_rl.weights import difference
from megatron_rl.weights.manifest import checksum
from megatron_rl.weights.nixl import Agent, PeerLostError
from megatron_rl.weights.store import NONE, Bytes, Header, Places, Store

READS = 8  # buckets on their way at once
_MISTAKES = 2
"""Wrong checksums of one bucket before its source is reported: it may have been overwritten."""
_ROUNDS = 30  # rounds of this process, at least, in which a source is silent before it is given up
_FIRST_LOOK, _LONGEST_LOOK = 0.001, 0.03  # seconds between two looks at a header without news


class SourceFailedError(RuntimeError):
    """A source that cannot be used any more."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source}: {reason}")
        self.source, self.reason = source, reason


@dataclass(slots=True)
class Peer:
    """One region of a source: some buckets of the version, in another process's memory."""

    source: str  # its name among stores
    metadata: bytes  # NIXL's description of the process
    agent: str  # its name in NIXL
    region: Region
    buckets: list[int]  # numbers in the manifest
    places: Places
    copy: Bytes  # buffer of the header's bytes
    header: Header | None = None  # newest one that was read
    looking: Any = None  # handle of a read of the header
    look_at: float = 0.0  # time of the next one
    pause: float = _FIRST_LOOK
    alive_at: float = field(default_factory=time.monotonic)  # last sign of life
    lost: bool = False  # the connection broke


class Peers:
    """The peers that an agent is connected to; they stay so from one version to the next.

    No connection is ever closed: when the peer of an endpoint that NIXL closed with work in flight
    ends, UCX calls back into freed memory, and the process aborts. NIXL closes broken ones itself.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._known: dict[str, list[Peer]] = {}
        self._late: list[tuple[Any, Bytes]] = []

    def of(self, source: StoreSource, manifest: Manifest) -> list[Peer]:
        """Return the regions of a source; SourceFailedError: no connection to it."""
        self._late = [late for late in self._late if not self.ended(late[0])]
        known = self._known.get(source.name, [])
        if not known or any(peer.lost or peer.metadata != source.agent for peer in known):
            for peer in known:
                self._end_look(peer)
            known = self._known[source.name] = self._connect(source, manifest)
        for peer in known:
            self._end_look(peer)  # what it says is of another version, or of another run's
            peer.header, peer.alive_at, peer.look_at = None, time.monotonic(), 0.0
        return known

    def _connect(self, source: StoreSource, manifest: Manifest) -> list[Peer]:
        try:
            name = self._agent.connect(source.agent)
        except Exception as e:  # NIXL's exceptions have no base of their own
            raise SourceFailedError(source.name, f"no connection: {e}") from e
        peers = []
        for region in source.regions:
            buckets = manifest.buckets_of(region.owner)
            places = Places([manifest.buckets[i].num_bytes for i in buckets])
            copy = self._registered(places.header_bytes)
            peers.append(Peer(source.name, source.agent, name, region, buckets, places, copy))
        return peers

    def _end_look(self, peer: Peer) -> None:
        if peer.looking is not None and not self.ended(peer.looking):
            peer.copy = self.replaced(peer.looking, peer.copy)
        peer.looking = None

    def _registered(self, num_bytes: int) -> Bytes:
        buffer = np.zeros(num_bytes, dtype=np.uint8)
        self._agent.register([buffer])
        return buffer

    def replaced(self, handle: Any, buffer: Bytes) -> Bytes:
        """Return a new buffer; that of a read not waited for is kept: its peer may write it yet."""
        self._late.append((handle, buffer))
        return self._registered(buffer.size)

    def ended(self, handle: Any) -> bool:
        """Return True if a read does not write its memory any more."""
        try:
            return self._agent.done(handle)
        except PeerLostError:
            return True


@dataclass(slots=True)
class _Read:
    """A bucket on its way."""

    bucket: int
    peer: Peer
    buffer: Bytes
    differences: list[tuple[int, int, int]]
    """(base, version, bytes) of each difference; empty: the whole bucket."""
    handle: Any
    num_bytes: int
    checking: Future[bool] | None = None


class Pull:
    """One version on its way into a store; `advance` does what can be done now.

    Args:
        agent: whose memory includes the store's regions and `buffers`; `peers` are its connections.
        store: of all buckets of the manifest, that of the version to take.
        buffers: at least one, each as large as the largest bucket.
        executor: compares checksums.
        peer_seconds: silence after which a source is given up.
    """

    def __init__(
        self,
        agent: Agent,
        peers: Peers,
        store: Store,
        manifest: Manifest,
        buffers: list[Bytes],
        executor: Executor,
        peer_seconds: float,
    ) -> None:
        self._agent, self._known = agent, peers
        self._store, self.manifest = store, manifest
        self._buffers, self._executor = buffers, executor
        self._peer_seconds = peer_seconds
        self._peers: list[Peer] = []
        self._reads: list[_Read] = []
        self._mistakes: Counter[tuple[str, int]] = Counter()
        self._started: float | None = None
        self._advanced_at = time.monotonic()
        self.num_bytes: Counter[str] = Counter()  # bytes read from each source
        self.slot = store.slot_for(manifest.version)
        missing_N = store.header.versions_2N[self.slot] != manifest.version
        self.left = int(missing_N.sum())  # buckets that are not in the store
        self._wanted_N = missing_N  # buckets that are neither here nor on their way

    @property
    def seconds(self) -> float:
        """Seconds since the first sources were named."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    def use(self, sources: Sequence[StoreSource]) -> None:
        """Take what is missing from these sources from now on; raises as `Peers.of`.

        Raises:
            SourceFailedError: one that cannot be connected.
        """
        self._started = self._started or time.monotonic()
        self._peers = [p for source in sources for p in self._known.of(source, self.manifest)]

    def advance(self) -> float:
        """Start and finish reads; return the seconds until something may have changed.

        SourceFailedError: this source is not used any more; `use` names others.
        """
        now = time.monotonic()
        if (still := now - self._advanced_at - self._peer_seconds / _ROUNDS) > 0:
            for peer in self._peers:  # a process that does not run hears no other
                peer.alive_at = min(now, peer.alive_at + still)
        self._advanced_at = now
        for peer in self._peers:
            with _blaming(self, peer):
                self._look(peer)
        for read in list(self._reads):
            with _blaming(self, read.peer):
                self._finish(read)
        for peer in self._peers:
            with _blaming(self, peer):
                self._start_reads(peer)
        if self._reads or any(peer.looking for peer in self._peers):
            return _FIRST_LOOK
        now = time.monotonic()
        return max(0.0, min([*(peer.look_at for peer in self._peers), now + _LONGEST_LOOK]) - now)

    def _look(self, peer: Peer) -> None:
        now = time.monotonic()
        if peer.looking is not None:
            if self._agent.done(peer.looking):
                peer.looking = None
                words = peer.copy.view(np.int64).copy()
                before, peer.header = peer.header, Header(words)
                if before is None or before.heartbeat != peer.header.heartbeat:
                    peer.alive_at = now
                new = before is None or (before.versions_2N != peer.header.versions_2N).any()
                peer.pause = _FIRST_LOOK if new else min(2 * peer.pause, _LONGEST_LOOK)
                peer.look_at = now + peer.pause
        elif now >= peer.look_at and self.left:
            peer.looking = self._agent.read(peer.agent, [(peer.region.addresses[0], peer.copy)])
        if now - peer.alive_at > self._peer_seconds:
            raise SourceFailedError(
                peer.source, f"no sign of life for {self._peer_seconds:g} s (timeouts.peer_seconds)"
            )

    def _start_reads(self, peer: Peer) -> None:
        if peer.header is None:
            return
        ready_N = (peer.header.versions_2N == self.manifest.version).any(0)
        for local in np.flatnonzero(ready_N & self._wanted_N[peer.buckets]):
            if not self._buffers:
                return
            self._start(peer, peer.header, int(local))

    def _start(self, peer: Peer, header: Header, local: int) -> None:
        bucket = peer.buckets[local]
        bases = [int(v) for v in self._store.header.versions_2N[:, bucket] if v != NONE]
        chain = None
        if not self._mistakes[peer.source, bucket]:
            chain = header.chain(local, self.manifest.version, bases)
        buffer, places = self._buffers.pop(), peer.places
        differences: list[tuple[int, int, int]] = []
        spans: list[tuple[int, Bytes]] = []
        end = 0
        for d in chain or ():
            size = int(header.sizes_2N[d, local])
            address = peer.region.addresses[3 + d] + places.differences[local]
            spans.append((address, buffer[end : end + size]))
            base, target = int(header.bases_2N[d, local]), int(header.targets_2N[d, local])
            differences.append((base, target, size))
            end += size
        if not chain:
            slot = header.slot_of(local, self.manifest.version)
            assert slot is not None
            address = peer.region.addresses[1 + slot] + places.offsets[local]
            spans.append((address, buffer[: self.manifest.buckets[bucket].num_bytes]))
        read = _Read(bucket, peer, buffer, differences, None, sum(s.size for _, s in spans))
        self._reads.append(read)
        self._wanted_N[bucket] = False
        read.handle = self._agent.read(peer.agent, spans)

    def _finish(self, read: _Read) -> None:
        if read.checking is None:
            if self._agent.done(read.handle):
                read.peer.alive_at = time.monotonic()
                self.num_bytes[read.peer.source] += read.num_bytes
                read.checking = self._executor.submit(self._accept, read)
        elif read.checking.done():
            self._reads.remove(read)
            self._buffers.append(read.buffer)
            if read.checking.result():
                self.left -= 1
                return
            self._wanted_N[read.bucket] = True
            read.peer.look_at, mistake = 0.0, (read.peer.source, read.bucket)
            self._mistakes[mistake] += 1
            if self._mistakes[mistake] >= _MISTAKES:
                name = f"bucket {read.bucket} of weights version {self.manifest.version}"
                reason = f"{name} has {_MISTAKES} times another checksum than the trainer's"
                raise SourceFailedError(read.peer.source, reason)

    def _accept(self, read: _Read) -> bool:
        """Put a bucket into the store; return False if it is not what the manifest says."""
        store, bucket, version = self._store, read.bucket, self.manifest.version
        expected, target = self.manifest.buckets[bucket], store.bucket(self.slot, bucket)
        versions = store.header.versions_2N
        if not read.differences:
            whole = read.buffer[: expected.num_bytes]
            if checksum(whole) != expected.checksum:
                return False
            versions[self.slot, bucket] = NONE
            target[:] = whole
        else:
            holder = store.header.slot_of(bucket, read.differences[0][0])
            assert holder is not None
            versions[self.slot, bucket] = NONE
            if holder != self.slot:
                target[:] = store.bucket(holder, bucket)
            parts = np.split(read.buffer, np.cumsum([size for _, _, size in read.differences]))
            try:
                for part in parts[:-1]:
                    difference.apply(target, part)
            except ValueError:
                return False
            if checksum(target) != expected.checksum:
                return False
            for part, (base, made, _) in zip(parts[:-1], read.differences, strict=True):
                store.put_difference(bucket, base, made, part)
        versions[self.slot, bucket] = version
        return True

    def drop(self, source: str) -> None:
        """Stop using a source; what it still sends goes into buffers that are used no more."""
        self._peers = [peer for peer in self._peers if peer.source != source]
        for read in list(self._reads):
            if read.peer.source == source and read.checking is None:
                self._reads.remove(read)
                self._wanted_N[read.bucket] = True
                self._buffers.append(self._known.replaced(read.handle, read.buffer))

    def stop(self, seconds: float) -> None:
        """Leave the version as it is: wait for the reads, for so long at most, and checks."""
        deadline = time.monotonic() + seconds
        for read in self._reads:
            if read.checking is not None:
                read.checking.result()
            while read.checking is None and not self._known.ended(read.handle):
                if time.monotonic() > deadline:
                    self._buffers.append(self._known.replaced(read.handle, read.buffer))
                    break
                time.sleep(_FIRST_LOOK)
            else:
                self._buffers.append(read.buffer)
        self._peers, self._reads = [], []


@contextmanager
def _blaming(pull: Pull, peer: Peer) -> Iterator[None]:
    """Turn the loss of a peer into the failure of its source, which is dropped."""
    try:
        yield
    except PeerLostError as e:
        peer.lost = True
        pull.drop(peer.source)
        raise SourceFailedError(peer.source, f"it is gone ({e})") from e
    except SourceFailedError as e:
        pull.drop(e.source)
        raise
