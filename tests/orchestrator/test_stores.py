"""The tree of stores, its failures, its limits, and what they mean for generators and batches."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.messages import (
    Hello,
    Manifest,
    SourceFailed,
    StoreSource,
    TakeVersion,
    VersionTaken,
)
from megatron_rl.orchestrator import RunError
from megatron_rl.orchestrator.generators import Generators
from megatron_rl.orchestrator.stores import GRACE_SECONDS, RETRY_SECONDS, Stores
from tests.orchestrator.peers import run, small_config
from tests.orchestrator.test_schedules import changed

TRAINER = "trainer-store-t", "trainer-store-u"


def manifest(version: int) -> Manifest:
    return Manifest(version=version, buckets=(), root="/root", nodes=("t", "u"))


class Cluster:
    """Stores, and what a real store of each name would do."""

    def __init__(self, count: int, engines: int = 2) -> None:
        config = changed(small_config(), roles={"generator_ranks": engines})
        self.stores, self.generators = Stores(config), Generators(config)
        self.keep: set[int] = set()
        self.requests: dict[str, TakeVersion] = {}
        self.joined = 0
        for name in TRAINER:
            self.join(name, "trainer-store", name[-1])
        for number in range(count):
            self.join(f"store-{number}")

    def join(self, name: str, role: str = "store", node: str = "") -> None:
        self.joined += 1
        self.requests.pop(name, None)
        node = node or name.removeprefix("store-")
        hello = Hello(role=role, rank=-1, version=-1, node=node, folder=f"/{name}")
        self.stores.add(name, hello)

    def publish(self, version: int) -> None:
        self.stores.publish(manifest(version))
        self.generators.publish(manifest(version), self.keep | self.stores.versions)

    def advance(self) -> list[tuple[str, TakeVersion]]:
        """Send all that can be sent; a store that has no memory maps it at once."""
        sent, new = [], list(self.stores.requests(self.generators, self.keep))
        while new:
            sent += new
            for name, request in new:
                self.requests[name] = request
                if self[name].memory is None:
                    incarnation = str(self.joined).encode()
                    self.stores.mapped(name, StoreSource(name, incarnation, ()))
            new = list(self.stores.requests(self.generators, self.keep))
        return sent

    def add_generator(self, number: int, node: str):
        return ready(self.generators, number, node)

    def __getitem__(self, name: str):
        return next(s for s in self.stores if s.name == name)

    def sources(self, name: str) -> list[str]:
        return [source.name for source in self.requests[name].sources]

    def take(self, name: str) -> tuple[float, int]:
        """Complete the version that a store takes."""
        request = self.requests.pop(name)
        num_bytes = {source.name: 100 for source in request.sources}
        version = request.manifest.version
        return self.stores.taken(
            name, VersionTaken(version=version, seconds=1.0, num_bytes=num_bytes)
        )

    def fail(self, name: str, source: str) -> str:
        version = self.requests[name].manifest.version
        self.requests[name] = TakeVersion(manifest=self.requests[name].manifest)
        return self.stores.failed(name, SourceFailed(version=version, source=source, reason="torn"))

    @property
    def names(self) -> list[str]:
        return [s.name for s in self.stores if s.name not in TRAINER]


def ready(generators: Generators, number: int, node: str):
    """Add a generator whose engine runs."""
    generators.join(f"generator-{number}", "process 1 on here", True, 0.0)
    return generators.hello(f"generator-{number}", node, 8)


def names(numbers) -> list[str]:
    return [f"store-{number}" for number in numbers]


def test_two_of_a_hundred_stores_take_from_the_trainer_and_nobody_feeds_more_than_two() -> None:
    cluster = Cluster(100)
    assert cluster.advance() == []  # no version yet
    for version in range(3):
        cluster.publish(version)
        sent = cluster.advance()
        first = {name: next(r for n, r in sent if n == name) for name in cluster.names}
        # memory is mapped first; what is mapped is named with its sources
        assert all(bool(request.sources) == (version > 0) for request in first.values())
        parents = {name: cluster.sources(name) for name in cluster.names}
        assert parents["store-0"] == parents["store-1"] == list(TRAINER)
        assert parents["store-2"] == ["store-0"] and parents["store-99"] == ["store-48"]
        children = Counter(source for sources in parents.values() for source in sources)
        assert set(children.values()) <= {1, 2} and children["trainer-store-t"] == 2
        assert {r.manifest.version for r in cluster.requests.values()} == {version}
        from_trainer = sum(cluster.take(name)[1] for name in cluster.names)
        assert from_trainer == 2 * 200
        assert cluster.advance() == [] and cluster.stores.oldest_taken() is None


def test_a_source_is_named_only_once_its_memory_is_mapped() -> None:
    cluster = Cluster(3)
    cluster.publish(0)
    first = dict(cluster.stores.requests(cluster.generators, set()))
    assert first.keys() == {*TRAINER, *cluster.names}
    assert not any(request.sources for request in first.values())

    def mapped(name: str) -> list[str]:
        cluster.stores.mapped(name, StoreSource(name, b"", ()))
        return [name for name, _ in cluster.stores.requests(cluster.generators, set())]

    assert mapped("store-2") == [] and mapped("store-1") == []
    assert mapped(TRAINER[0]) == [] and mapped(TRAINER[1]) == ["store-1"]
    assert mapped("store-0") == ["store-0", "store-2"]


def test_a_failed_source_is_named_and_replaced_until_it_is_healthy_again() -> None:
    cluster = Cluster(10)
    cluster.publish(0)
    cluster.advance()
    cluster.take("store-1")
    line = cluster.fail("store-2", "store-0")
    assert "store-2" in line and "version 0 from store-0: torn" in line
    assert [name for name, _ in cluster.advance()] == ["store-2"]
    assert cluster.sources("store-2") == ["store-1"]  # complete before its place in the tree
    cluster.fail("store-3", "store-0")
    cluster.advance()
    assert cluster.sources("store-3") == ["store-1"]
    for name in set(cluster.names) - {"store-1"}:
        cluster.take(name)
    cluster.publish(1)
    cluster.advance()
    # the suspect is a leaf of version 1, and healthy once it has that
    assert cluster.sources("store-0") == ["store-4"]
    assert cluster.sources("store-1") == cluster.sources("store-2") == list(TRAINER)
    assert not any("store-0" in cluster.sources(name) for name in cluster.names)
    for name in cluster.names:
        cluster.take(name)
    cluster.publish(2)
    cluster.advance()
    assert cluster.sources("store-2") == ["store-0"]


def test_a_newcomer_gets_a_peer_and_not_the_trainer() -> None:
    cluster = Cluster(1)
    cluster.publish(0)
    cluster.advance()
    cluster.take("store-0")
    cluster.join("store-1")
    cluster.advance()
    assert cluster.sources("store-1") == ["store-0"]
    cluster = Cluster(5)
    cluster.publish(0)
    cluster.advance()
    cluster.join("store-5")  # while all others take the version
    cluster.join("store-0")  # again: without its memory, and last
    cluster.advance()
    assert cluster.sources("store-5") == ["store-2"]
    # store-2 and store-3, and with it store-5, still wait for what it was before
    assert cluster.sources("store-0") == ["store-4"]


def test_a_slow_store_gets_one_version_at_a_time_and_then_the_newest() -> None:
    cluster = Cluster(3)
    for version in range(4):
        cluster.publish(version)
        cluster.advance()
        for name in ("store-1", "store-2"):
            if name in cluster.requests:
                cluster.take(name)
        assert cluster.requests["store-0"].manifest.version == 0
        assert cluster.stores.oldest_taken() == 0
    cluster.take("store-0")
    cluster.advance()
    assert cluster.requests["store-0"].manifest.version == 3
    assert cluster.sources("store-0") == ["store-1"]  # it has it: not the trainer
    # What it was asked for before it joined again does not count.
    cluster.stores.taken("store-0", VersionTaken(version=7, seconds=0.0, num_bytes={}))
    assert 7 not in cluster["store-0"].complete and cluster.stores.oldest_taken() == 3


def test_a_store_without_another_source_tries_the_trainer_again_after_a_pause(monkeypatch) -> None:
    cluster = Cluster(1)
    cluster.publish(0)
    cluster.advance()
    cluster.fail("store-0", TRAINER[1])
    assert cluster.advance() == []
    later = time.monotonic() + RETRY_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: later)
    ((name, request),) = cluster.advance()
    assert name == "store-0" and [s.name for s in request.sources] == list(TRAINER)


def stale(cluster: Cluster, name: str) -> bool:
    """Return True if the source of a store has ended and joined again since it was named."""
    sources = cluster.requests[name].sources if name in cluster.requests else ()
    return any(cluster[source.name].memory != source for source in sources)


def able(cluster: Cluster, name: str) -> bool:
    """Return True if the sources of a store have all of the version that it takes."""
    if name not in cluster.requests or stale(cluster, name):
        return False
    version, sources = cluster.requests[name].manifest.version, cluster.sources(name)
    return bool(sources) and all(s in TRAINER or version in cluster[s].complete for s in sources)


def check_no_cycle(cluster: Cluster) -> None:
    for name in cluster.names:
        seen = [name]
        while seen[-1] in cluster.requests and not stale(cluster, seen[-1]):
            request = cluster.requests[seen[-1]]
            source = request.sources[0].name if request.sources else TRAINER[0]
            if source in TRAINER or request.manifest.version in cluster[source].complete:
                break
            assert source not in seen, f"{seen} wait for each other"
            # else nobody would ever give it
            assert cluster.requests[source].manifest.version == request.manifest.version
            seen.append(source)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**9), count=st.integers(1, 12), steps=st.integers(1, 60))
def test_no_cycle_and_no_store_without_a_version_under_any_failures(seed, count, steps) -> None:
    rng, cluster, version, given_batch = random.Random(seed), Cluster(count), 0, False
    now = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now)
        cluster.publish(0)
        for _ in range(steps):
            cluster.advance()
            check_no_cycle(cluster)
            oldest, name = cluster.stores.oldest_taken(), rng.choice(cluster.names)
            match rng.choice(["take", "take", "take", "fail", "join", "batch", "publish"]):
                case "take" if able(cluster, name):
                    cluster.take(name)
                case "fail" if name in cluster.requests and cluster.sources(name):
                    cluster.fail(name, rng.choice(cluster.sources(name)))
                case "join":
                    cluster.join(name)
                case "batch" if oldest is None or oldest >= version:
                    cluster.stores.batch_given(version)
                    given_batch = True
                case "publish" if given_batch:
                    version, given_batch = version + 1, False
                    cluster.publish(version)
            now += 0.3
        for _ in range(20 * count):  # without more failures
            cluster.advance()
            check_no_cycle(cluster)
            for name in cluster.names:
                if able(cluster, name):
                    cluster.take(name)
                elif stale(cluster, name):
                    cluster.fail(name, cluster.sources(name)[0])
            now += 0.3
        assert {cluster[name].complete[-1] for name in cluster.names} == {version}


# ---------------------------------------------------------------- generators and batches


def test_a_generator_gets_the_newest_version_that_its_node_has_and_skips_none_to_evaluate() -> None:
    cluster = Cluster(1)
    generators, stores = cluster.generators, cluster.stores
    near, far = cluster.add_generator(0, "t"), cluster.add_generator(1, "0")

    def updates() -> dict[str, tuple[int, str]]:
        cluster.advance()
        sent = dict(generators.updates(cluster.keep, stores.folder, 0.0))
        return {name: (u.manifest.version, u.folder) for name, u in sent.items()}

    def updated(*states) -> None:
        for state in states:
            state.version, state.updating = state.updating, None

    cluster.publish(0)
    # two nodes have the trainer's stores: nobody sees both
    assert updates() == {}
    cluster.take("store-0")
    assert updates() == {"generator-1": (0, "/store-0")}
    assert generators.oldest_read(set()) == 0
    updated(far)
    cluster.publish(1)
    updates()
    cluster.publish(2)
    cluster.take("store-0")  # of version 1, while 2 is the newest
    assert updates() == {"generator-1": (1, "/store-0")}
    assert cluster.requests["store-0"].manifest.version == 2
    updated(far)
    far.evaluating = 1
    cluster.take("store-0")
    cluster.keep = {3}
    for version in (3, 4):
        cluster.publish(version)
    assert updates() == {} and cluster.requests["store-0"].manifest.version == 3
    assert generators.oldest_read(cluster.keep) == 3
    cluster.take("store-0")
    assert updates() == {} and cluster.requests["store-0"].manifest.version == 4
    far.evaluating = None
    assert updates() == {"generator-1": (3, "/store-0")}
    cluster.take("store-0")
    cluster.publish(5)
    assert updates() == {} and "store-0" not in cluster.requests, "5 would overwrite what it loads"
    updated(far)
    near.version = 3
    assert updates() == {"generator-1": (4, "/store-0")}


def test_generators_on_the_only_node_of_the_trainer_read_its_stores() -> None:
    config = small_config()
    stores, generators = Stores(config), Generators(config)
    for number, node in enumerate(("t", "anywhere")):
        ready(generators, number, node)
    for version, nodes, expected in ((0, ("t",), 1), (1, (), 2)):
        one = Manifest(version=version, buckets=(), root="/root", nodes=nodes)
        stores.publish(one)
        generators.publish(one, set())
        sent = list(generators.updates(set(), stores.folder, 0.0))
        assert len(sent) == expected and {update.folder for _, update in sent} == {""}
        assert list(stores.requests(generators, set())) == []
        for generator in generators:
            generator.version, generator.updating = generator.updating or -1, None
    stores.batch_given(2)  # its step replaces version 1, which nobody may begin to read now
    assert stores.folder(one, "t") is None


def test_a_run_over_nodes_trains_and_evaluates_the_same_steps() -> None:
    config = changed(small_config(), roles={"generator_ranks": 4})
    slow = {"slowness": 0.05}
    for stores in ([{}, {}, {}, {}], [slow, {}, slow, {"fails": 3}]):
        outcome = run(config, nodes=("t", "u"), stores=stores, announce_after=0.02, slowness=0.01)
        assert [row["step"] for row in outcome.rows.steps] == list(range(12))
        assert [row["step"] for row in outcome.rows.evals] == [0, 3, 6, 12]
        for number, generator in enumerate(outcome.generators):
            assert set(generator.folders) == {f"/store-{number}"}
            assert generator.versions == sorted(set(generator.versions))
            assert {0, 3, 6, 12} <= set(generator.versions)
        rows = [row for row in outcome.rows.steps if "stores_seconds" in row]
        assert rows and all(row["stores_trainer_bytes"] % 20 == 0 for row in rows)
        taken = {version for version, _ in outcome.stores["store-3"].sources}
        assert {0, 3, 6, 12} <= taken


def test_no_batch_is_given_before_the_readers_of_the_last_version_are_known() -> None:
    orchestrator = run(small_config(steps=3)).orchestrator
    # version 3 is the newest: that of step 5 - 1 may still be on its way
    assert orchestrator._is_free(4) and not orchestrator._is_free(5)


def test_a_source_that_fails_in_a_run_is_named_on_the_terminal(capfd) -> None:
    config = changed(small_config(), roles={"generator_ranks": 3})
    outcome = run(config, nodes=("t",), stores=[{}, {}, {"fails": 1}])
    assert [row["step"] for row in outcome.rows.steps] == list(range(12))
    error = capfd.readouterr().err
    assert re.search(
        r"warning: store-2 cannot take weights version 0 from (trainer-store-t|store-[01]): torn",
        error,
    )


# ---------------------------------------------------------------- limits


def test_what_is_late_or_missing_is_named() -> None:
    timeouts = small_config().timeouts
    startup, transfer = timeouts.startup_seconds, timeouts.transfer_seconds + GRACE_SECONDS

    def late(cluster: Cluster, seconds: float, message: str, lost: Sequence[str] = ()) -> None:
        assert cluster.stores.check(time.monotonic() + seconds - 5, {}, {}) == []
        with nullcontext() if lost else pytest.raises(RunError, match=message):
            found = cluster.stores.check(time.monotonic() + seconds + 1, {}, {})
            assert [name for name, reason in found if re.search(message, reason)] == lost

    cluster = Cluster(3)
    cluster.publish(0)
    list(cluster.stores.requests(cluster.generators, set()))
    for name in (*TRAINER, "store-0"):
        cluster.stores.mapped(name, StoreSource(name, b"", ()))
    list(cluster.stores.requests(cluster.generators, set()))
    unmapped = r"it has not mapped its memory within timeouts\.startup_seconds"
    late(cluster, startup, unmapped, ["store-1", "store-2"])
    for name in ("store-1", "store-2"):
        cluster.stores.mapped(name, StoreSource(name, b"", ()))
    cluster.advance()
    cluster.take("store-1")
    slow = r"it has not taken weights version 0 .*trainer-store-t, trainer"
    late(cluster, transfer, slow, ["store-0"])
    assert cluster.sources("store-2") == ["store-0"]
    cluster.stores.remove("store-0")
    cluster.advance()
    assert cluster.sources("store-2") == ["store-1"], "it takes from another one now"

    cluster = Cluster(1)
    del cluster.stores._trainer["u"]
    cluster.publish(0)
    cluster.advance()
    late(cluster, startup, "store-0 has no source of weights version 0 .*trainer's nodes u have no")

    cluster = Cluster(0)
    cluster.add_generator(0, "7")
    cluster.publish(0)
    now, nodes = time.monotonic(), cluster.generators.nodes
    bare = [cluster.stores.bare_nodes(now + t, nodes) for t in (0, startup - 1, startup + 1)]
    assert bare == [[], [], ["7"]]
    cluster.join("store-7")
    assert cluster.stores.bare_nodes(now + startup + 2, nodes) == []
    assert "store-7" in cluster.stores and "store-9" not in cluster.stores
