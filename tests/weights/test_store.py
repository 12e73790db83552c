"""A store on one node: slots, header, differences, locks, memory, and what killed runs leave."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.store import NONE, PAGE, VERSIONS_HELD, Store, hold, remove_unused

SIZES = (70_000, 16, 4096)
SHARED_MEMORY = Path("/dev/shm")


def write(store: Store, version: int) -> int:
    """Write a version whose bytes are its number; return its slot."""
    slot = store.slot_for(version)
    store.header.versions_2N[slot] = NONE
    for i in range(len(SIZES)):
        store.bucket(slot, i)[:] = version
        assert store.complete(version) is None
        store.header.versions_2N[slot, i] = version
    return slot


def test_the_two_newest_versions_stay_and_another_mapping_sees_them(tmp_path):
    store = Store(tmp_path / "s", SIZES)
    assert (store.newest(), store.complete(1)) == (NONE, None)
    for version in (1, 2, 5, 6, 7):
        slot = write(store, version)
        other = Store(tmp_path / "s", SIZES)  # a generator's
        assert other.complete(version) == slot
        assert other.newest() == version
        assert all((other.bucket(slot, i) == version).all() for i in range(len(SIZES)))
    assert store.complete(6) == 1 - slot
    assert store.complete(5) is None
    assert (store.bucket(1 - slot, 0) == 6).all()


def test_a_begun_version_goes_on_in_its_slot_and_spares_the_complete_one(tmp_path):
    store = Store(tmp_path / "s", SIZES)
    write(store, 3)
    slot = store.slot_for(4)
    assert slot != store.complete(3)
    store.header.versions_2N[slot, 1] = 4
    assert (store.complete(4), store.newest()) == (None, 3)
    for version in (4, 9):  # the same, or a newer one instead: never over the complete one
        assert store.slot_for(version) == slot


def test_a_store_without_buckets_has_every_version(tmp_path):
    """A trainer rank that joins no bucket publishes as the others do."""
    store = Store(tmp_path / "s", [])
    slot = store.slot_for(1)
    store.header.versions_2N[slot] = 1
    assert store.complete(1) is not None


def test_differences_lead_from_what_is_held_to_what_is_wanted(tmp_path):
    store = Store(tmp_path / "s", SIZES)
    header = store.header
    data = np.arange(100, dtype=np.uint8)
    for base, version in ((4, 5), (5, 7), (7, 8)):
        store.put_difference(0, base, version, data)
    # 5 and 7 are both odd, so 5 -> 7 took the place of 4 -> 5.
    assert header.chain(0, 8, [7]) == [0]
    assert header.chain(0, 8, [5]) == [1, 0]
    assert header.chain(0, 8, [5, 7]) == [0]  # the shorter one
    assert header.chain(0, 8, [8]) == []
    assert header.chain(0, 8, [4]) is None
    assert header.chain(0, 7, [5]) == [1]
    assert header.chain(1, 8, [7]) is None  # of another bucket
    assert list(store.regions()[3][:100]) == list(data)
    largest = store.largest_difference(0)
    assert largest == SIZES[0] // 16
    store.put_difference(0, 8, 9, np.zeros(largest + 1, dtype=np.uint8))
    assert header.chain(0, 9, [8]) is None  # too large: not kept
    assert header.chain(0, 8, [5]) is None  # and the one in its place is gone
    assert header.chain(0, 8, [7]) == [0]


def test_versions_of_another_trainer_are_forgotten_once_nobody_loads_one(tmp_path):
    store, other = (Store(tmp_path, [100]) for _ in range(2))
    store.keep_only("/dev/shm/one", 1.0)
    store.header.versions_2N[0] = 3
    store.put_difference(0, 2, 3, np.zeros(5, dtype=np.uint8))
    for mapped in (store, other):
        mapped.keep_only("/dev/shm/one", 1.0)
        assert (mapped.complete(3), mapped.header.chain(0, 3, [2])) == (0, [1])
    with other.locked(1, write=False, seconds=1), pytest.raises(WeightsError, match="still loads"):
        store.keep_only("/dev/shm/two", 0.01)
    assert other.complete(3) == 0
    store.keep_only("/dev/shm/two", 0.01)
    assert (other.complete(3), other.header.chain(0, 3, [2])) == (None, None)


def test_files_of_other_sizes_are_replaced_together_and_only_by_the_stores_own_process(tmp_path):
    before = Store(tmp_path, [100_000, 100])
    before.header.versions_2N[:] = 3
    with pytest.raises(WeightsError, match="it belongs to another model or run"):
        Store(tmp_path, [100_000, 10_000])
    (tmp_path / "users").touch()
    assert Store(tmp_path, [100_000, 100], replace=True).complete(3) == 0
    after = Store(tmp_path, [100_000, 10_000], replace=True)
    assert after.complete(3) is None
    after.bucket(0, 0)[:] = 7
    assert not before.bucket(0, 0).any()
    assert (tmp_path / "users").exists()


def test_all_memory_is_allocated_at_the_start(tmp_path):
    store = Store(tmp_path / "s", [1_000_000, 600_000])
    files = {path.name: path.stat() for path in (tmp_path / "s").iterdir()}
    assert sorted(files) == ["difference0", "difference1", "header", "slot0", "slot1"]
    assert all(file.st_blocks * 512 >= file.st_size > 0 for file in files.values())
    whole = sum(file.st_size for file in files.values())
    assert VERSIONS_HELD * 1_600_000 <= whole <= VERSIONS_HELD * 1_600_000 + 16 * PAGE
    assert [region.size for region in store.regions()][:2] == [8 * (2 + 8 * 2), 1_605_632]


def test_too_little_memory_is_an_error_that_names_file_size_and_remedy(tmp_path):
    disk = os.statvfs(SHARED_MEMORY)
    size = 2 * disk.f_blocks * disk.f_frsize
    folder = SHARED_MEMORY / f"test_store_{os.getpid()}"
    try:
        with pytest.raises(WeightsError, match=rf"slot0: no memory for {size} bytes.*--shm-size"):
            Store(folder, [size])
        assert not (folder / "slot0").exists()
        Store(folder, [PAGE]).bucket(0, 0)[:] = 1  # nothing of it is in the way
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_files_of_another_model_are_refused(tmp_path):
    Store(tmp_path / "s", SIZES)
    with pytest.raises(WeightsError, match="slot0 has 81920 bytes, and these versions need 16384:"):
        Store(tmp_path / "s", (PAGE + 1, 1, 1))


def test_a_writer_waits_for_readers_and_readers_for_it(tmp_path):
    store = Store(tmp_path / "s", SIZES)
    order = []

    def write_in_slot_0():
        with store.locked(0, write=True, seconds=20):
            order.append("written")

    with store.locked(0, write=False, seconds=0), store.locked(0, write=False, seconds=0):
        with store.locked(1, write=True, seconds=0):  # the other slot is free
            pass
        with (
            pytest.raises(WeightsError, match="no lock within 0 s, a generator still loads"),
            store.locked(0, write=True, seconds=0),
        ):
            pass
        writer = threading.Thread(target=write_in_slot_0)
        writer.start()
        time.sleep(0.05)
        order.append("read")
    writer.join(20)
    assert order == ["read", "written"]
    with (
        store.locked(0, write=True, seconds=0),
        pytest.raises(WeightsError, match="it is being written"),
        store.locked(0, write=False, seconds=0),
    ):
        pass


HOLD = "import sys; from megatron_rl.weights.store import hold; hold(__import__('pathlib').Path("
USER = HOLD + "sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_folders_of_killed_processes_are_removed_and_those_of_living_ones_are_not(tmp_path):
    users = []
    for name in ("run_a", "run_a", "run_b"):
        user = subprocess.Popen(
            [sys.executable, "-c", USER, str(tmp_path / name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        users.append(user)
    try:
        assert [user.stdout.readline() for user in users] == [b"held\n"] * 3
        (tmp_path / "run_a/0").mkdir()
        (tmp_path / "run_a/0/slot0").write_bytes(bytes(10))
        for name in ("run_not_ours", "other"):
            (tmp_path / name).mkdir()
        everything = ["other", "run_a", "run_b", "run_not_ours"]
        for killed, left in (
            ([], everything),
            ([0, 2], ["other", "run_a", "run_not_ours"]),  # one user of run_a is left
            ([1], ["other", "run_not_ours"]),
        ):
            for number in killed:
                users[number].kill()
                users[number].wait(20)
            remove_unused(tmp_path, "run_")
            assert sorted(p.name for p in tmp_path.iterdir()) == left
    finally:
        for user in users:
            user.kill()
            user.communicate()


def test_a_folder_that_is_removed_while_it_is_taken_is_made_again(tmp_path):
    stop = threading.Event()

    def remove():
        while not stop.is_set():
            remove_unused(tmp_path, "run")

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for _ in range(200):
            descriptor = hold(tmp_path / "run")
            for _ in range(3):
                assert os.fstat(descriptor).st_nlink == 1
                assert (tmp_path / "run/users").exists()
            os.close(descriptor)
    finally:
        stop.set()
        remover.join(20)
