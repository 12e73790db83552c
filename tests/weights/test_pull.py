"""Real store processes take versions from each other over NIXL, while some of them fail."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
import torch

from megatron_rl import messages as m
from megatron_rl.orchestrator_connection import OrchestratorConnection
from megatron_rl.weights.store_process import OTHER_LAYOUT, StoreSpec
from tests.weights.fleet import TRAINER, Fleet

STORES = [f"store-{i}" for i in range(8)]
"""The first two take from the trainer; store-0 is the source of 2 and 3, store-2 of 6 and 7."""
SIZE = 2 * 2**20
SLOW = SIZE
"""Bytes a second of all stores but the first two: a whole version takes them a second."""
RATES = {"store-0": 0.0, "store-1": 0.0}

pytestmark = pytest.mark.timeout(240)


def random_version(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = SIZE // 32 // 2
    return {f"t{i}": torch.randn(shape, generator=generator).bfloat16() for i in range(32)}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        fleet.start_all({TRAINER: 0} | {name: RATES.get(name, SLOW) for name in STORES})
        yield fleet
    finally:
        fleet.close()


def publish_random(fleet: Fleet) -> int:
    """Publish a version in which everything is new; return it."""
    version = 1 if fleet.manifest is None else fleet.manifest.version + 1
    fleet.failed.clear()
    fleet.publish(version, random_version(version))
    return version


def until_midway(fleet: Fleet, seconds: float = 0.0) -> None:
    """Serve until store-0 has all buckets and store-2 some; others have no more than that.

    On a busy machine store-0 may be behind: those that follow wait for it, stopped, for so many
    seconds at least. It takes from the trainer, if the stores have joined in their order.
    """
    fleet.until(lambda: fleet.progress("store-2") > 0.2)
    for name in STORES[2:]:
        fleet.signal(name, signal.SIGSTOP)
    try:
        awake_at = time.monotonic() + seconds
        fleet.until(lambda: fleet.progress("store-0") == 1 and time.monotonic() > awake_at)
        assert max(fleet.progress(name) for name in STORES[2:]) < 0.8
    finally:
        for name in STORES[2:]:
            fleet.signal(name, signal.SIGCONT)


def culprits(fleet: Fleet) -> set[tuple[str, str]]:
    """Return (reporter, source) of all reports."""
    return {(name, message.source) for name, message in fleet.failed}


def test_a_version_reaches_all_stores_and_leaves_the_trainer_twice(fleet):
    publish_random(fleet)
    fleet.until_taken(STORES)
    assert fleet.differs(STORES) == []
    parents = [TRAINER, TRAINER, *(f"store-{(i - 2) // 2}" for i in range(2, len(STORES)))]
    for name, parent in zip(STORES, parents, strict=True):
        assert fleet.bytes_of(name) == {parent: fleet.manifest.num_bytes}, name
    assert fleet.failed == []


def test_50_versions_of_differences_of_which_some_stores_skip_every_tenth(fleet):
    first = publish_random(fleet)
    fleet.until_taken(STORES)
    tensors = random_version(first)
    generator = torch.Generator().manual_seed(3)
    skipping = {"store-1", "store-5"}  # one of them is a source of others
    late = []
    for version in range(first + 1, first + 52):
        for tensor in tensors.values():  # a thousandth of the values
            places = torch.randint(tensor.numel(), (32,), generator=generator)
            tensor[places] = torch.randn(32, generator=generator).bfloat16()
        takers = fleet.publish_skipping(version, tensors, skipping)
        manifest = fleet.manifest
        assert {*takers} == {*STORES} - (set() if version % 10 else skipping)
        fleet.until_taken(takers)
        assert fleet.differs(takers) == []
        sent: Counter[str] = Counter()
        for name in takers:
            sent.update(fleet.bytes_of(name))
        most = max(sum(fleet.bytes_of(name).values()) for name in takers)
        assert most * 50 < manifest.num_bytes, version
        assert sent[TRAINER] <= 2 * most, version
        late += [name for name in skipping if (name, version) not in fleet.taken]
    assert Counter(late) == {"store-1": 5, "store-5": 5}
    assert fleet.failed == []


def test_a_newcomer_is_fed_by_others_and_one_that_starts_again_keeps_what_it_has(fleet):
    version = publish_random(fleet)
    fleet.until_taken(STORES)
    fleet.start("store-8")
    fleet.until_taken(["store-8"])
    assert fleet.differs(["store-8"]) == []
    assert sum(fleet.bytes_of("store-8").values()) == fleet.manifest.num_bytes
    assert set(fleet.bytes_of("store-8")) < set(STORES)
    fleet.signal("store-8", signal.SIGKILL)
    del fleet.taken["store-8", version]
    fleet.start("store-8")
    fleet.until_taken(["store-8"])
    assert sum(fleet.bytes_of("store-8").values()) == 0
    assert fleet.differs(["store-8"]) == []
    assert fleet.failed == []
    fleet.signal("store-8", signal.SIGKILL)  # a leaf, which nobody misses
    publish_random(fleet)
    fleet.until_taken(STORES)
    assert fleet.failed == []


def test_a_wrong_byte_is_refused_and_its_source_named_and_replaced(fleet):
    publish_random(fleet)
    until_midway(fleet)
    last = len(fleet.manifest.buckets) - 1
    fleet.spoil("store-0", last)
    fleet.until_taken(STORES)
    assert fleet.differs(STORES[1:]) == []
    assert culprits(fleet) == {("store-2", "store-0"), ("store-3", "store-0")}
    for _, message in fleet.failed:
        assert f"bucket {last} of weights version {message.version}" in message.reason
        assert "another checksum than the trainer's" in message.reason
    # It applies a difference to its spoiled bytes, sees it, and takes the bucket whole.
    tensors = random_version(fleet.manifest.version)
    tensors["t3"][7] = 1.0
    fleet.failed.clear()
    fleet.publish(fleet.manifest.version + 1, tensors)
    fleet.until_taken(STORES)
    assert fleet.differs(STORES) == []
    assert fleet.failed == []
    largest = max(bucket.num_bytes for bucket in fleet.manifest.buckets)
    assert largest <= sum(fleet.bytes_of("store-0").values()) < 2 * largest
    publish_random(fleet)  # and is a source again
    fleet.until_taken(STORES)
    assert "store-0" in {source for name in STORES for source in fleet.bytes_of(name)}
    assert fleet.failed == []


def test_a_store_that_stalls_is_replaced_and_those_that_wait_for_it_are_not_blamed(fleet):
    publish_random(fleet)
    until_midway(fleet)
    fleet.signal("store-0", signal.SIGSTOP)
    try:
        fleet.until_taken([name for name in STORES if name != "store-0"])
    finally:
        fleet.signal("store-0", signal.SIGCONT)
    assert fleet.differs(STORES) == []
    assert culprits(fleet) == {("store-2", "store-0"), ("store-3", "store-0")}
    assert {message.reason for _, message in fleet.failed} == {
        "no sign of life for 3 s (timeouts.peer_seconds)"
    }
    publish_random(fleet)
    fleet.until_taken(STORES)
    assert fleet.differs(STORES) == []
    assert fleet.failed == []


def test_stores_that_stood_still_themselves_blame_nobody(fleet):
    publish_random(fleet)
    until_midway(fleet, 3.5)
    fleet.until_taken(STORES)
    assert fleet.failed == []


def test_stores_that_die_are_replaced_and_join_again(fleet):
    publish_random(fleet)
    until_midway(fleet)
    for name in ("store-0", "store-2"):
        fleet.signal(name, signal.SIGKILL)
    left = [name for name in STORES if name not in ("store-0", "store-2")]
    fleet.until_taken(left)
    assert fleet.differs(left) == []
    # Which dead store a reader is pointed to next depends on who reports first.
    named = culprits(fleet)
    assert named >= {("store-3", "store-0"), ("store-6", "store-2"), ("store-7", "store-2")}
    assert {source for _, source in named} == {"store-0", "store-2"}
    fleet.start_all({"store-0": 0, "store-2": SLOW})
    fleet.until_taken(STORES)
    publish_random(fleet)
    fleet.until_taken(STORES)
    assert fleet.differs(STORES) == []
    assert fleet.failed == []


def test_stores_stay_when_trainer_and_orchestrator_are_replaced_and_no_version_is_mixed_up(fleet):
    fleet.join_again(STORES)
    publish_random(fleet)
    until_midway(fleet)  # store-0 has all of it, others have some
    fleet.restart_trainer()
    processes = dict(fleet.processes)
    version = fleet.manifest.version
    fleet.publish(version, random_version(1000))  # the same number
    fleet.until_taken(STORES)
    assert fleet.differs(STORES) == []
    num_bytes = [sum(fleet.bytes_of(name).values()) for name in STORES]
    assert num_bytes == [fleet.manifest.num_bytes] * len(STORES)
    tensors = random_version(1000)
    tensors["t3"][7] = 1.0
    fleet.publish(version + 1, tensors)  # differences again
    fleet.until_taken(STORES)
    assert fleet.differs(STORES) == []
    assert max(sum(fleet.bytes_of(name).values()) for name in STORES) < fleet.manifest.num_bytes / 8
    assert fleet.failed == []
    assert fleet.processes == processes
    assert {processes[name].poll() for name in STORES} == {None}


def test_a_store_whose_conversation_is_ended_joins_again_and_keeps_what_it_has(fleet):
    publish_random(fleet)
    until_midway(fleet)
    memory = {name: fleet.memory(name) for name in ("store-0", "store-2")}
    for name in memory:
        fleet.end_conversation(name)
    fleet.until_taken(STORES)
    assert fleet.differs(STORES) == []
    assert sum(fleet.bytes_of("store-2").values()) < 0.9 * fleet.manifest.num_bytes
    publish_random(fleet)
    fleet.until_taken(STORES)
    assert fleet.differs(STORES) == []
    # The buffers that they have made since are not for peers to read.
    assert {name: fleet.memory(name) for name in memory} == memory
    assert fleet.failed == []


def test_a_restarted_run_with_other_buckets_gets_new_store_processes(fleet):
    fleet.restart_trainer(bucket_bytes=2**17)
    fleet.publish(1, random_version(2000))
    fleet.until(lambda: all(fleet.processes[name].poll() == OTHER_LAYOUT for name in STORES))
    fleet.start_all(dict.fromkeys(STORES, 0.0))
    fleet.until_taken(STORES)
    assert fleet.differs(STORES) == []
    assert fleet.failed == []


def test_a_store_without_an_orchestrator_ends_after_its_time(tmp_path):
    spec = StoreSpec(
        name="store-alone", node="alone", endpoint=str(tmp_path / "none.json"),
        folder=str(tmp_path / "store"), transfer_seconds=1, peer_seconds=1, shutdown_seconds=1,
        rejoin_seconds=0.5,
    )  # fmt: skip
    code = (
        "import sys; from megatron_rl.weights import store_process;"
        "store_process.REJOIN_MARGIN = 0.0; store_process.main(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, msgspec.json.encode(spec).decode()],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"no orchestrator at {tmp_path}/none.json for 0.5 s (timeouts.rejoin" in done.stderr


@pytest.mark.timeout(20)  # of Python's `SimpleQueue`, some of these waits never end
def test_every_short_wait_for_a_message_ends(tmp_path):
    connection = OrchestratorConnection(tmp_path / "none.json", "store-alone")
    try:
        for _ in range(20_000):
            connection._deliver(m.encode(m.Stop()))
            assert connection.receive(0) == m.Stop()
            assert connection.receive(2e-6) is None
    finally:
        connection.close()
