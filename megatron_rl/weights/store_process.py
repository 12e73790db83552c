"""The store of a node, as a process: takes versions from other stores, and is a source for them.

    python -m megatron_rl.weights.store_process SPEC      (JSON of a `StoreSpec`)

    orchestrator                                 store
    TakeVersion(manifest)                 ───►   maps the version's memory
                    ◄─── StoreMemory             can be a source now
    TakeVersion(manifest, sources)        ───►   `pull.Pull`
                    ◄─── SourceFailed            names the source and the reason; waits for others
                    ◄─── VersionTaken            the generators of this node can load it

When the conversation begins again, the store says hello again, and StoreMemory at the next version.
Of a version of a trainer that was restarted, it keeps nothing but the memory.

On the trainer's nodes, a store process does not take versions: it makes the stores that the
trainer's ranks write readable by others. Neither torch nor Megatron is imported here.
"""

import os
import queue
import secrets
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np

from megatron_rl import messages as m
from megatron_rl.orchestrator_connection import OrchestratorConnection
from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.nixl import Agent
from megatron_rl.weights.pull import READS, Peers, Pull, SourceFailedError
from megatron_rl.weights.store import Store, hold

_BUSY_SECONDS, _IDLE_SECONDS = 0.001, 0.01  # longest pause while peers may be reading, and else
_BUSY_AFTER = 5.0  # seconds after a version in which peers may be reading it
REJOIN_MARGIN = 5.0
_STOP_SECONDS = 1.0  # for the reads of a version that is dropped
OTHER_LAYOUT = 75
"""Exit status of a process that has memory for versions of other buckets than those that come."""
_Inbox = queue.Queue[bytes | None]


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a store process."""

    name: str  # socket identity, `store-<node>` or `trainer-store-<node>`
    node: str
    endpoint: str  # ZeroMQ address of the orchestrator, or the file that has it
    folder: str
    """Of the store; on a trainer's node the root, with a store per rank in `<folder>/<rank>`."""
    transfer_seconds: float
    peer_seconds: float
    shutdown_seconds: float
    rejoin_seconds: float  # wait for an orchestrator, at the start and without a connection
    serves_trainer: bool = False
    parent: int = 0
    """Id of the process with which it ends; 0: that which is its parent when it has started."""


class StoreProcess:
    """One store in the service of one run.

    `inbox` has the messages of the orchestrator, and None where another conversation begins.
    """

    def __init__(
        self,
        spec: StoreSpec,
        orchestrator: OrchestratorConnection,
        inbox: queue.Queue[bytes | None],
    ) -> None:
        self._spec, self._orchestrator, self._inbox = spec, orchestrator, inbox
        self._send = orchestrator.send
        self._agent = Agent(f"{spec.name}-{secrets.token_hex(4)}")
        self._peers, self._executor = Peers(self._agent), ThreadPoolExecutor(READS)
        self._stores: list[Store] = []
        self._regions: list[m.Region] = []
        self._buffers: list[np.ndarray] = []
        self._pull: Pull | None = None
        self._lock = ExitStack()
        self._busy_until = 0.0
        self._begin()

    def _begin(self) -> None:
        """Begin a conversation, with nothing on its way."""
        self._is_source = False
        if self._pull is not None:
            self._pull.stop(_STOP_SECONDS)
            self._pull = None
        self._lock.close()
        spec = self._spec
        role = "trainer-store" if spec.serves_trainer else "store"
        self._send(m.Hello(role=role, rank=-1, version=-1, node=spec.node, folder=spec.folder))

    def run(self) -> None:
        """Serve until Stop, or the parent is gone; WeightsError: no orchestrator or version."""
        parent, pause = self._spec.parent or os.getppid(), 0.0
        while os.getppid() == parent:
            try:
                data = self._inbox.get(timeout=pause) if pause else self._inbox.get_nowait()
            except queue.Empty:
                self._check_connection()
            else:
                message = None if data is None else m.decode(data)
                if isinstance(message, m.Stop):
                    return
                if message is None:
                    self._begin()
                else:
                    self._take(message)
            for store in self._stores:
                store.header.words[0] += 1
            self._agent.progress()
            busy = time.monotonic() < self._busy_until
            pause = _BUSY_SECONDS if busy else _IDLE_SECONDS
            if self._pull is not None:
                pause = min(pause, self._advance(self._pull))

    def _check_connection(self) -> None:
        if (error := self._orchestrator.error) is not None:
            raise WeightsError(f"the connection to the orchestrator ended: {error}") from error
        since, limit = self._orchestrator.disconnected_since, self._spec.rejoin_seconds
        # Its generators, which end with a better message, first.
        if since is not None and time.monotonic() - since > limit + REJOIN_MARGIN:
            raise WeightsError(
                f"no orchestrator at {self._orchestrator.endpoint} for {limit:g} s"
                " (timeouts.rejoin_seconds)"
            )

    def _take(self, message: m.TakeVersion) -> None:
        manifest = message.manifest
        if not self._is_source:
            self._become_source(manifest)
        self._busy_until = time.monotonic() + _BUSY_AFTER
        if self._spec.serves_trainer:
            return
        if self._pull is None:
            store, silence = self._stores[0], self._spec.peer_seconds
            self._pull = Pull(
                self._agent, self._peers, store, manifest, self._buffers, self._executor, silence
            )
            seconds = self._spec.transfer_seconds
            self._lock.enter_context(store.locked(self._pull.slot, write=True, seconds=seconds))
        if self._pull.manifest.version != manifest.version:
            raise WeightsError(
                f"weights version {manifest.version} was named while version"
                f" {self._pull.manifest.version} is on its way: one at a time"
            )
        if message.sources:
            try:
                self._pull.use(message.sources)
            except SourceFailedError as e:
                self._report(e, self._pull)

    def _become_source(self, manifest: m.Manifest) -> None:
        spec = self._spec
        if not self._stores:
            self._map(manifest)
        if not spec.serves_trainer:
            if self._stores[0].places.sizes != tuple(b.num_bytes for b in manifest.buckets):
                print(f"megatron_rl: {spec.name}: other buckets than before", file=sys.stderr)
                sys.exit(OTHER_LAYOUT)
            self._stores[0].keep_only(manifest.root, spec.transfer_seconds)
        metadata = self._agent.metadata([r for store in self._stores for r in store.regions()])
        source = m.StoreSource(spec.name, metadata, tuple(self._regions))
        self._send(m.StoreMemory(source=source))
        self._is_source = True

    def _map(self, manifest: m.Manifest) -> None:
        """Map and register the memory of versions like this one."""
        folder, spec = Path(self._spec.folder), self._spec
        owners = [-1]
        if spec.serves_trainer:
            owners = sorted({b.owner for b in manifest.buckets if (folder / f"{b.owner}").exists()})
        for owner in owners:
            sizes = [manifest.buckets[i].num_bytes for i in manifest.buckets_of(owner)]
            path = folder if owner < 0 else folder / str(owner)
            store = Store(path, sizes, replace=not spec.serves_trainer)
            self._agent.register(store.regions())
            addresses = tuple(region.ctypes.data for region in store.regions())
            self._regions.append(m.Region(owner, addresses))
            self._stores.append(store)
        if not spec.serves_trainer:
            largest = max(b.num_bytes for b in manifest.buckets)
            count = min(READS, len(manifest.buckets))
            self._buffers = [np.zeros(largest, dtype=np.uint8) for _ in range(count)]
            self._agent.register(self._buffers)

    def _advance(self, pull: Pull) -> float:
        pause = 0.0
        try:
            pause = pull.advance()
        except SourceFailedError as e:
            self._report(e, pull)
        if not pull.left:
            self._pull = None
            self._lock.close()
            self._busy_until = time.monotonic() + _BUSY_AFTER
            version, taken = pull.manifest.version, dict(pull.num_bytes)
            self._send(m.VersionTaken(version=version, seconds=pull.seconds, num_bytes=taken))
        elif pull.seconds > self._spec.transfer_seconds:
            raise WeightsError(
                f"weights version {pull.manifest.version} was not complete within"
                f" timeouts.transfer_seconds = {self._spec.transfer_seconds:g} of its first sources"
            )
        return pause

    def _report(self, error: SourceFailedError, pull: Pull) -> None:
        version = pull.manifest.version
        self._send(m.SourceFailed(version=version, source=error.source, reason=error.reason))


def start(spec: StoreSpec) -> subprocess.Popen[bytes]:
    """Start the process of a store as a child; it ends with its parent."""
    text = msgspec.json.encode(msgspec.structs.replace(spec, parent=os.getpid())).decode()
    # Ctrl-C and torchrun's signals, which reach process groups, do not end it.
    return subprocess.Popen([sys.executable, "-m", __spec__.name, text], process_group=0)


def main(text: str) -> None:
    """Run the store of a spec (JSON)."""
    spec = msgspec.json.decode(text, type=StoreSpec)
    if not spec.serves_trainer:  # it is needed while its generators finish their work
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    hold(Path(spec.folder))
    # A SimpleQueue may wait for ever: Python 3.12 passes a negative time-out on.
    inbox = _Inbox()
    endpoint = spec.endpoint if "://" in spec.endpoint else Path(spec.endpoint)
    orchestrator = OrchestratorConnection(endpoint, spec.name, inbox.put, lambda: inbox.put(None))
    delivery_seconds = 0.0
    try:
        StoreProcess(spec, orchestrator, inbox).run()
    except Exception as e:
        orchestrator.send_failed(f"{spec.name}: {type(e).__name__}: {e}")
        delivery_seconds = spec.shutdown_seconds / 2
        raise
    finally:
        orchestrator.close(delivery_seconds)


if __name__ == "__main__":
    main(sys.argv[1])
