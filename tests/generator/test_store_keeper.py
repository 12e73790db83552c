"""The store process of a node: which nodes have one, who keeps it, how often it is restarted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from megatron_rl.config import RunConfig
from megatron_rl.generator import store_keeper
from megatron_rl.generator.store_keeper import StoreKeeper, sees_trainer_stores, store_spec
from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.store import node_name
from megatron_rl.weights.store_process import OTHER_LAYOUT, StoreSpec

ENDPOINT = "tcp://127.0.0.1:5000"


def test_only_generators_that_cannot_read_all_of_the_trainers_stores_have_their_own() -> None:
    alone, shared = RunConfig(), RunConfig(weights={"directory": "/shared"})
    cases = [(alone, node_name(), True), (alone, "host-7", False), (alone, "", False)]
    for config, trainer_node, expected in [*cases, *((shared, node, True) for _, node, _ in cases)]:
        assert sees_trainer_stores(config, trainer_node) is expected, (config, trainer_node)


def test_each_node_of_each_run_has_its_own_folder_whoever_leads_the_run() -> None:
    config = RunConfig(timeouts={"peer_seconds": 3, "rejoin_seconds": 4})
    spec = store_spec(config, "host-1", ENDPOINT)
    assert (spec.name, spec.node) == ("store-host-1", "host-1")
    assert (spec.peer_seconds, spec.rejoin_seconds) == (3, 4)
    assert spec.folder.startswith("/dev/shm/megatron_rl_store_")
    next_spec = store_spec(config, "host-1", Path("/runs/run/orchestrator.json"))
    assert next_spec.folder == spec.folder
    assert (spec.endpoint, next_spec.endpoint) == (ENDPOINT, "/runs/run/orchestrator.json")
    same = RunConfig(output_dir=Path.cwd() / config.output_dir)
    assert store_spec(same, "host-1", ENDPOINT).folder == spec.folder
    others = [
        store_spec(config, "host-2", ENDPOINT),
        store_spec(RunConfig(output_dir="runs/other"), "host-1", ENDPOINT),
    ]
    assert len({spec.folder, *(other.folder for other in others)}) == 3


@pytest.fixture
def spec(tmp_path: Path) -> StoreSpec:
    return StoreSpec(
        name="store-a",
        node="a",
        endpoint=ENDPOINT,
        folder=str(tmp_path / "megatron_rl_store_a"),
        transfer_seconds=10,
        peer_seconds=10,
        shutdown_seconds=10,
        rejoin_seconds=10,
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield the processes that keepers start: they end at a number, with it as exit status."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(spec: StoreSpec) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "exit(int(input()))"]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return processes[-1]

    monkeypatch.setattr(store_keeper, "start", start)
    monkeypatch.setattr(store_keeper, "_EXIT_SECONDS", 0.1)
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def end(process: subprocess.Popen[bytes], status: int) -> None:
    assert process.stdin is not None
    process.stdin.write(b"%d\n" % status)
    process.stdin.flush()
    process.wait(60)


def test_one_generator_of_a_node_has_the_process_and_another_takes_over(spec, started):
    first, second, third = (StoreKeeper(spec) for _ in range(3))
    for keeper in (first, second, third):
        keeper.check()
    assert len(started) == 1
    first.close()
    assert started[0].returncode is not None
    second.check()
    third.check()
    assert len(started) == 2
    third.close()
    assert started[1].poll() is None
    assert Path(spec.folder).exists()
    second.close()
    assert started[1].returncode is not None
    assert not Path(spec.folder).exists(), "the last one removes it"


def test_a_killed_process_is_restarted_a_few_times_and_a_failed_one_is_reported(
    spec, started, monkeypatch, capfd
):
    keeper = StoreKeeper(spec)
    for count in range(1, store_keeper.RESTARTS + 1):
        started[-1].kill()
        started[-1].wait(60)
        keeper.check()
        keeper.check()
        assert len(started) == 1 + count
        assert f"store-a was killed by signal 9; it is started again ({count} of" in (
            capfd.readouterr().err
        )
    started[-1].kill()
    started[-1].wait(60)
    with pytest.raises(WeightsError, match=r"store-a ended with exit status -9, 3 restarts"):
        keeper.check()
    monkeypatch.setattr(store_keeper, "RESTARTS_WITHIN", 0.0)  # the earlier ends are long ago
    keeper.check()
    assert len(started) == 2 + store_keeper.RESTARTS
    end(started[-1], 3)
    with pytest.raises(WeightsError, match="store-a ended with exit status 3"):
        keeper.check()
    keeper.close()


def test_a_process_with_memory_for_other_versions_is_started_again_and_not_counted(spec, started):
    keeper = StoreKeeper(spec)
    for count in range(1, store_keeper.RESTARTS + 3):
        end(started[-1], OTHER_LAYOUT)
        keeper.check()
        assert len(started) == 1 + count
    keeper.close()


def test_a_process_that_the_orchestrator_stopped_stays_ended(spec, started):
    keeper = StoreKeeper(spec)
    end(started[0], 0)
    keeper.check()
    keeper.close()
    assert len(started) == 1


KEEPS = """
import sys, time, msgspec
from megatron_rl.generator.store_keeper import StoreKeeper
from megatron_rl.weights.store_process import StoreSpec
keeper = StoreKeeper(msgspec.json.decode(sys.argv[1], type=StoreSpec))
print(keeper._process.pid, flush=True)
time.sleep(100)
"""


def test_the_process_ends_with_a_generator_that_is_killed_even_while_it_starts(spec):
    keeping = subprocess.Popen(
        [sys.executable, "-c", KEEPS, msgspec.json.encode(spec).decode()], stdout=subprocess.PIPE
    )
    assert keeping.stdout is not None
    store = psutil.Process(int(keeping.stdout.readline()))
    keeping.kill()
    keeping.communicate()
    psutil.wait_procs([store], timeout=60)
    assert not store.is_running()


def test_a_killed_runs_folder_is_removed_by_the_next_one(spec, started):
    old = Path(spec.folder).with_name("megatron_rl_store_old")
    held = subprocess.Popen(
        [sys.executable, "-c", "import sys; from pathlib import Path;"
         "from megatron_rl.weights.store import hold; hold(Path(sys.argv[1]));"
         "print('held', flush=True); input()", str(old)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert held.stdout is not None and held.stdin is not None
    assert held.stdout.readline() == b"held\n"
    keeper = StoreKeeper(spec)
    assert old.exists()
    keeper.close()
    held.kill()
    held.communicate()
    keeper = StoreKeeper(spec)
    assert not old.exists()
    keeper.close()
