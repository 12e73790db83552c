"""The whole process of a generator, with vLLM, spoken to as orchestrators do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.config import RunConfig
from megatron_rl.files import replace_file
from megatron_rl.messages import (
    Failed,
    Generate,
    GeneratorStats,
    Grown,
    Hello,
    Join,
    Leaving,
    Manifest,
    Sample,
    ScoreRequest,
    Scores,
    Stop,
    StoreMemory,
    TakeVersion,
    TurnLimits,
    UpdateWeights,
    VersionTaken,
    WeightsUpdated,
    Welcome,
)
from megatron_rl.weights import store_process
from tests.generator import tiny_models
from tests.generator.conftest import run_config
from tests.router import Router
from tests.weights.versions import Versions, as_sent

pytestmark = pytest.mark.e2e
PROMPT = [1, 9, 18, 10, 24, 4]


class Orchestrator:
    """Tells its address in a file, as the orchestrator's process does."""

    def __init__(self, file: Path) -> None:
        self.router = Router()
        replace_file(file, json.dumps({"endpoint": self.router.endpoint}))
        self.received: list[object] = []
        self.senders: list[str] = []

    def send(self, message, to: str = "generator-0") -> None:
        self.router.send(to, message)

    def wait_for(self, kind: type, count: int = 1, seconds: float = 150.0, sender: str = ""):
        """All messages of this kind (of a sender) so far, once `count` have come."""
        limit = time.monotonic() + seconds

        def received() -> list[object]:
            pairs = zip(self.senders, self.received, strict=True)
            return [m for s, m in pairs if isinstance(m, kind) and sender in (s, "")]

        while len(received()) < count:
            left = limit - time.monotonic()
            assert left > 0, f"{count} {kind.__name__} did not come, but {self.received}"
            if (arrived := self.router.receive(left)) is not None:
                self.senders.append(arrived[0])
                self.received.append(arrived[1])
                assert not isinstance(self.received[-1], Failed), self.received[-1]
        return received()

    def welcome(self, config: RunConfig, model_dir: Path) -> Hello:
        """Answer a generator that joins, and return its Hello."""
        (join,) = self.wait_for(Join, sender="generator-0")
        assert join.supervised and join.process.endswith(f" on {socket.gethostname()}")
        tree = config.model_dump(mode="json")
        self.send(Welcome(config=tree, model_dir=str(model_dir), trainer_node="trainer"))
        (hello,) = self.wait_for(Hello, sender="generator-0")
        return hello

    def close(self) -> None:
        self.router.close()


def stores_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [p for p in children if "megatron_rl.weights.store_process" in p.cmdline()]


def take(orchestrator: Orchestrator, manifest: Manifest, store: str, trainer: str) -> None:
    """Have a node's store take a version from the trainer's, as the orchestrator does."""
    for name in (store, trainer):
        orchestrator.send(TakeVersion(manifest=manifest), to=name)
    (memory,) = orchestrator.wait_for(StoreMemory, sender=trainer)
    orchestrator.send(TakeVersion(manifest=manifest, sources=(memory.source,)), to=store)
    (taken,) = orchestrator.wait_for(VersionTaken, sender=store)
    assert (taken.version, taken.num_bytes) == (manifest.version, {trainer: manifest.num_bytes})


def test_a_generator_on_another_node_serves_one_orchestrator_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    model_dir = tiny_models.save("llama", 0, tmp_path / "model")
    tree = run_config(
        model_dir, thinking_budget_tokens=(60, 60), concurrent_completions=6
    ).model_dump(mode="json")
    tree["roles"] |= {"trainer_ranks": 2}
    tree["fleet"] |= {"report_tokens": 16}
    config = RunConfig.model_validate(tree)
    file = tmp_path / "orchestrator.json"
    orchestrator = Orchestrator(file)
    environment = os.environ | {  # torchrun's: they must not reach vLLM's workers
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    # Complete before anything decodes, so that the update meets requests in flight.
    versions = Versions(tmp_path / "weights", nodes=("trainer",))
    tiny_models.save("llama", 1, tmp_path / "next")
    manifest = versions.write(8, as_sent(tiny_models.checkpoint(tmp_path / "next")))
    trainer = store_process.start(
        store_process.StoreSpec(
            name="trainer-store-trainer", node="trainer", endpoint=orchestrator.router.endpoint,
            folder=str(versions.root), serves_trainer=True, transfer_seconds=60, peer_seconds=10,
            shutdown_seconds=5, rejoin_seconds=60,
        )
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.cli", "generate", "--join", str(file),
         "--name", "generator-0", "--agent", str(os.getpid())],
        start_new_session=True, env=environment,
    )  # fmt: skip
    try:
        hello = orchestrator.welcome(config, model_dir)
        node = f"{socket.gethostname()}-1"
        assert hello == Hello(role="generator", rank=2, version=0, capacity=6, node=node)
        engine = psutil.Process(process.pid).children(recursive=True)
        (own_store,) = stores_of(process.pid)
        assert len(engine) >= 2

        store = f"store-{node}"
        (hello,) = orchestrator.wait_for(Hello, sender=store)
        assert (hello.role, hello.node) == ("store", node)
        orchestrator.wait_for(Hello, sender="trainer-store-trainer")
        take(orchestrator, manifest, store, "trainer-store-trainer")
        # A store that is killed is started again, and what it took is still there.
        own_store.kill()
        orchestrator.wait_for(Hello, 2, sender=store)
        engine += stores_of(process.pid)

        for group in range(4):
            orchestrator.send(
                Generate(group=group, prompt_id=10 + group, prompt=PROMPT, temperature=1.0,
                         limits=[TurnLimits(n, 8) for n in (50, 60, 55, 60)], indices=[0, 1, 2, 3],
                         evaluation=-1 if group < 3 else 5)
            )  # fmt: skip
        orchestrator.wait_for(Sample, 2)
        orchestrator.send(UpdateWeights(manifest=manifest, folder=hello.folder))
        samples = orchestrator.wait_for(Sample, 16)
        (updated,) = orchestrator.wait_for(WeightsUpdated)
        assert updated.version == 8
        assert 1 <= updated.requests_in_flight <= 6
        assert 0 < updated.transfer_seconds < updated.pause_seconds
        assert sorted((s.group, s.index) for s in samples) == [
            (g, i) for g in range(4) for i in range(4)
        ]
        for sample in samples:
            assert sample.prompt_id == 10 + sample.group
            assert sample.evaluation == (5 if sample.group == 3 else -1)
            assert len(sample.token_ids) == len(sample.logprobs) == 4 * sample.spans[-1].end
        assert {s.spans[-1].version for s in samples} >= {8}
        assert any(len(s.spans) == 2 for s in samples)
        assert {grown.group for grown in orchestrator.wait_for(Grown, 3)} <= {0, 1, 2}
        # Admission is first in, first out: the first group does not wait for the last one.
        order = [s.group for s in samples]
        assert order.index(0) < order.index(3)

        orchestrator.send(ScoreRequest(step=3, prompts=[PROMPT], completions=[[9, 9, 5]]))
        (scores,) = orchestrator.wait_for(Scores)
        assert (scores.step, scores.version, len(scores.logprobs[0])) == (3, 8, 3)
        stats = orchestrator.wait_for(GeneratorStats, 2)
        assert all(s.aborted == 0 and 0 <= s.busy_seconds <= s.seconds * 1.01 for s in stats)

        # The next orchestrator, at another address, is joined with the same engine.
        orchestrator.send(
            Generate(group=4, prompt_id=14, prompt=PROMPT, temperature=1.0,
                     limits=[TurnLimits(60, 8)], indices=[0])
        )  # fmt: skip
        orchestrator.close()
        trainer.kill()
        orchestrator = Orchestrator(file)
        assert orchestrator.welcome(config, model_dir).version == 8
        assert [p for p in engine if not p.is_running()] == [own_store]
        orchestrator.send(
            Generate(group=0, prompt_id=10, prompt=PROMPT, temperature=1.0,
                     limits=[TurnLimits(50, 8), TurnLimits(60, 8)], indices=[2, 5])
        )  # fmt: skip
        # It leaves with what is begun.
        process.send_signal(signal.SIGTERM)
        orchestrator.wait_for(Leaving)
        samples = orchestrator.wait_for(Sample, 2)
        assert {(s.group, s.index) for s in samples} == {(0, 2), (0, 5)}
        for name in ("generator-0", store):
            orchestrator.send(Stop(), to=name)
        assert process.wait(timeout=60) == 0
        psutil.wait_procs(engine, timeout=5)
        assert [p for p in engine if p.is_running()] == []
        assert not Path(hello.folder).exists()
    finally:
        for child in (process, trainer):
            child.kill()
            child.wait()
        orchestrator.close()
        versions.close()
