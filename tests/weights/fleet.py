"""A fleet of real store processes on this machine, led by the orchestrator's own logic.

Links are TCP (`UCX_TLS=tcp`): shared memory could be read from a stopped process as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.files import replace_file
from megatron_rl.orchestrator.generators import Generators
from megatron_rl.orchestrator.stores import Stores
from megatron_rl.weights.store import Store
from megatron_rl.weights.store_process import StoreSpec
from tests.router import Router
from tests.source import ROOT
from tests.weights.versions import Versions

TRAINER = "trainer-store-0"


class Fleet:
    """Stores `store-0`, `store-1` and so on, and the trainer's store process.

    Args:
        folder: of all files.
        owners: trainer ranks with a store each.
        bucket_bytes: of a version.
        peer_seconds: silence after which a source is given up.
        transports: UCX's (`UCX_TLS`); None: those of this process's environment.
    """

    def __init__(
        self,
        folder: Path,
        owners: int = 2,
        bucket_bytes: int = 2**16,
        peer_seconds: float = 3.0,
        transports: str | None = "tcp",
    ) -> None:
        self.folder = folder
        self._config = RunConfig(
            timeouts={
                "startup_seconds": 60,
                "transfer_seconds": 60,
                "peer_seconds": peer_seconds,
                "shutdown_seconds": 5,
                "rejoin_seconds": 30,
            }
        )
        self._environment = os.environ | ({"UCX_TLS": transports} if transports else {})
        self.versions = Versions(folder / "trainer", bucket_bytes, owners, nodes=("0",))
        self.manifest: m.Manifest | None = None
        self.python = [sys.executable]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.taken: dict[tuple[str, int], m.VersionTaken] = {}
        self.times: dict[tuple[str, int], float] = {}
        """Seconds from the announcement until a store said that it has a version."""
        self._announced_at = 0.0
        self.failed: list[tuple[str, m.SourceFailed]] = []
        self._withheld: dict[str, list[m.Message]] = {}
        self._endpoint = folder / "orchestrator.json"
        self._start_orchestrator()

    def _start_orchestrator(self) -> None:
        self._router = Router()
        replace_file(self._endpoint, json.dumps({"endpoint": self._router.endpoint}))
        self._stores, self._generators = Stores(self._config), Generators(self._config)

    def restart_trainer(self, bucket_bytes: int | None = None) -> None:
        """Replace the trainer, its stores and the orchestrator; the other stores join again."""
        self.signal(TRAINER, signal.SIGKILL)
        self._router.close()
        before, root = self.versions, f"trainer-after-{self.versions.root.name}"
        before.close()
        self.versions = Versions(
            self.folder / root, bucket_bytes or before.bucket_bytes, before.owners, nodes=("0",)
        )
        self.taken.clear()
        self.failed.clear()
        self._start_orchestrator()
        self.start(TRAINER)
        self._join(sorted(n for n, process in self.processes.items() if process.poll() is None))

    def end_conversation(self, name: str) -> None:
        """End the conversation with a store, which joins again."""
        self._router.end(name)

    def join_again(self, names: Sequence[str]) -> None:
        """End the conversations with stores, which join again in this order."""
        for name in names:
            self.end_conversation(name)
        self._join(names)

    def start(self, name: str, bytes_per_second: float = 0.0) -> None:
        """Start a store process, again if it has ended."""
        trainer = name == TRAINER
        spec = StoreSpec(
            name=name,
            node="0" if trainer else name,
            endpoint=str(self._endpoint),
            folder=str(self.versions.root if trainer else self.folder / name),
            transfer_seconds=self._config.timeouts.transfer_seconds,
            peer_seconds=self._config.timeouts.peer_seconds,
            shutdown_seconds=self._config.timeouts.shutdown_seconds,
            rejoin_seconds=self._config.timeouts.rejoin_seconds,
            serves_trainer=trainer,
        )
        module = ["megatron_rl.weights.store_process"]
        if bytes_per_second:
            module = ["tests.weights.limited_store", str(bytes_per_second)]
        command = [*self.python, "-m", *module, msgspec.json.encode(spec).decode()]
        self.processes[name] = subprocess.Popen(command, env=self._environment, cwd=ROOT)

    def start_all(self, rates: Mapping[str, float]) -> None:
        """Start stores with these limits in bytes a second; they join in this order."""
        for name, rate in rates.items():
            self.start(name, rate)
        self._join(list(rates))

    def _join(self, names: Sequence[str]) -> None:
        """Wait for stores that start or join again; the tree has them in this order."""
        hellos: dict[str, m.Hello] = {}
        deadline = time.monotonic() + 30 + 5 * len(names)
        while len(hellos) < len(names):
            assert time.monotonic() < deadline, f"of {names}, {list(hellos)} have joined"
            if (arrived := self._router.receive(0.1)) is None:
                continue
            name, message = arrived
            if name in names and isinstance(message, m.Hello):
                hellos[name] = message
            elif name not in names:
                self._receive(name, message)
        for name in names:
            self._handle(name, hellos[name])

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> m.Manifest:
        """Write a version into the trainer's stores and announce it.

        The test waits before that until nobody takes the version whose slot this one gets.
        """
        return self.announce(self.versions.write(version, tensors))

    def announce(self, manifest: m.Manifest) -> m.Manifest:
        """Announce a version that is written."""
        self.manifest = manifest
        self._announced_at = time.monotonic()
        self._stores.publish(manifest)
        self._stores.batch_given(manifest.version - 1)
        self._request()
        return manifest

    def withhold(self, name: str) -> None:
        """Keep a store's messages from the orchestrator: for it, the store works on."""
        self._withheld[name] = []

    def release(self) -> None:
        """Deliver what was withheld."""
        withheld, self._withheld = self._withheld, {}
        for name, messages in withheld.items():
            for message in messages:
                self._handle(name, message)
        self._request()

    def publish_skipping(
        self, version: int, tensors: Mapping[str, torch.Tensor], skipping: Collection[str]
    ) -> list[str]:
        """Publish a version, of which some stores skip every tenth; return those that take it.

        For the orchestrator, the skipping ones take the version before still when it comes.
        """
        if version % 10 == 9:
            for name in skipping:
                self.withhold(name)
        self.publish(version, tensors)
        if version % 10 == 1:
            self.release()
        stores = [name for name in self.processes if name != TRAINER]
        return [name for name in stores if version % 10 or name not in skipping]

    def until(self, condition: Callable[[], object], seconds: float = 30.0) -> None:
        """Serve the stores until the condition holds.

        Raises:
            AssertionError: it does not within these seconds, or a store has failed.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s; {self}"
            if (arrived := self._router.receive(0.005)) is not None:
                self._receive(*arrived)
            self._request()

    def _receive(self, name: str, message: m.Message) -> None:
        if isinstance(message, m.VersionTaken):
            self.taken[name, message.version] = message
            self.times[name, message.version] = time.monotonic() - self._announced_at
        if name in self._withheld:
            self._withheld[name].append(message)
        else:
            self._handle(name, message)

    def __str__(self) -> str:
        newest = {name: max(v for n, v in self.taken if n == name) for name, _ in self.taken}
        ended = {n: p.poll() for n, p in self.processes.items() if p.poll() is not None}
        failed = [(name, failure.source, failure.reason) for name, failure in self.failed]
        return f"newest versions {newest}, ended {ended}, failed {failed}"

    def _handle(self, name: str, message: m.Message) -> None:
        if isinstance(message, m.Hello):
            self._stores.add(name, message)
        elif isinstance(message, m.StoreMemory):
            self._stores.mapped(name, message.source)
        elif isinstance(message, m.VersionTaken):
            self._stores.taken(name, message)
        elif isinstance(message, m.SourceFailed):
            self.failed.append((name, message))
            line = self._stores.failed(name, message)
            assert message.source in line
            assert message.reason in line
        else:
            raise AssertionError(f"{name}: {message}")

    def _request(self) -> None:
        for name, request in self._stores.requests(self._generators, set()):
            self._router.send(name, request)

    def until_taken(self, names: Collection[str], seconds: float = 30.0) -> None:
        """Serve until these stores have the newest version."""
        assert self.manifest is not None
        version = self.manifest.version
        self.until(lambda: all((name, version) in self.taken for name in names), seconds)

    def store(self, name: str) -> Store:
        """Map the memory of a store process."""
        assert self.manifest is not None
        return Store(self.folder / name, [b.num_bytes for b in self.manifest.buckets])

    def progress(self, name: str) -> float:
        """Return the part of the newest version's buckets that a store has."""
        assert self.manifest is not None
        if not (self.folder / name / "difference1").exists():
            return 0.0
        held_2N = self.store(name).header.versions_2N == self.manifest.version
        return float(held_2N.any(0).mean())

    def differs(self, names: Collection[str]) -> list[str]:
        """Return the stores, and buckets, whose newest version is not the trainer's bytes."""
        assert self.manifest is not None
        version, wrong = self.manifest.version, []
        for name in names:
            store = self.store(name)
            slot = store.complete(version)
            for i in range(len(self.manifest.buckets)):
                expected = self.versions.bucket(version, i).numpy()
                if slot is None or not np.array_equal(store.bucket(slot, i), expected):
                    wrong.append(f"{name}, bucket {i}")
        return wrong

    def spoil(self, name: str, bucket: int) -> None:
        """Change a byte of the newest version in a store's memory."""
        assert self.manifest is not None
        store = self.store(name)
        slot = store.complete(self.manifest.version)
        assert slot is not None
        store.bucket(slot, bucket)[5] ^= 1

    def memory(self, name: str) -> m.StoreSource | None:
        """Return what a store has told of its memory."""
        return next(store.memory for store in self._stores if store.name == name)

    def bytes_of(self, name: str) -> dict[str, int]:
        """Return what a store read for the newest version, by source."""
        assert self.manifest is not None
        return self.taken[name, self.manifest.version].num_bytes

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a store process."""
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait(20)

    def close(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            process.kill()
            process.wait(20)
        self._router.close()
        self.versions.close()
