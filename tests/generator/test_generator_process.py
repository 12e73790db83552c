"""The whole role, with vLLM, spoken to as the orchestrator does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import zmq

from megatron_rl.messages import (
    Generate,
    GeneratorStats,
    Hello,
    Sample,
    ScoreRequest,
    Scores,
    Stop,
    UpdateWeights,
    WeightsUpdated,
    decode,
    encode,
)
from megatron_rl.weights.transports.disk import DiskPublisher
from tests.generator import tiny_models
from tests.generator.conftest import run_config

pytestmark = pytest.mark.e2e
PROMPT = [1, 9, 18, 10, 24, 4]


class Orchestrator:
    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.received: list[object] = []

    def send(self, message) -> None:
        self.socket.send_multipart([b"generator-0", encode(message)])

    def wait_for(self, kind: type, count: int = 1, seconds: float = 150.0):
        """All messages so far, once `count` of this kind have come."""
        limit = time.monotonic() + seconds
        while sum(isinstance(m, kind) for m in self.received) < count:
            left = limit - time.monotonic()
            assert left > 0, f"{count} {kind.__name__} did not come, but {self.received}"
            if self.socket.poll(1000 * left):
                identity, payload = self.socket.recv_multipart()
                assert identity == b"generator-0"
                self.received.append(decode(payload))
        return [m for m in self.received if isinstance(m, kind)]

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


def test_a_generator_serves_through_signals_and_leaves_no_process_behind(tmp_path):
    model_dir = tiny_models.save("llama", 0, tmp_path / "model")
    config = run_config(model_dir, thinking_budget_tokens=(60, 60), concurrent_completions=6)
    orchestrator = Orchestrator()
    environment = os.environ | {  # torchrun's: they must not reach vLLM's workers
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.generator.role_process", config.model_dump_json(),
         f"tcp://127.0.0.1:{orchestrator.port}", str(model_dir)],
        start_new_session=True, env=environment,
    )  # fmt: skip
    publisher = DiskPublisher(tmp_path / "weights")
    # Complete before anything decodes, so that the update meets requests in flight.
    tiny_models.build("llama", 1).save_pretrained(tmp_path / "next")
    tensors = tiny_models.checkpoint(tmp_path / "next")
    manifest = publisher.publish(8, iter(tensors.items()), 2**20)
    try:
        (hello,) = orchestrator.wait_for(Hello)
        assert hello == Hello(role="generator", rank=2, version=7, capacity=6)
        engine = psutil.Process(process.pid).children(recursive=True)
        assert engine

        # Ctrl-C and torchrun reach the whole session's group; the role goes on until Stop.
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGTERM)

        for group in range(4):
            orchestrator.send(
                Generate(group=group, prompt_id=10 + group, prompt=PROMPT, temperature=1.0,
                         thinking_budgets=[50, 60, 55, 60], answer_budget=8,
                         evaluation=-1 if group < 3 else 5)
            )  # fmt: skip
        orchestrator.wait_for(Sample, 2)
        orchestrator.send(UpdateWeights(manifest=manifest))
        samples = orchestrator.wait_for(Sample, 16)
        (updated,) = orchestrator.wait_for(WeightsUpdated)
        assert updated.version == 8
        assert 1 <= updated.requests_in_flight <= 6
        assert 0 < updated.transfer_seconds < updated.pause_seconds < 5
        assert sorted((s.group, s.index) for s in samples) == [
            (g, i) for g in range(4) for i in range(4)
        ]
        for sample in samples:
            assert sample.prompt_id == 10 + sample.group
            assert sample.evaluation == (5 if sample.group == 3 else -1)
            assert len(sample.token_ids) == len(sample.logprobs) == sample.spans[-1].end
        assert {s.spans[-1].version for s in samples} >= {8}
        assert any(len(s.spans) == 2 for s in samples)
        # Admission is first in, first out: the first group does not wait for the last one.
        order = [s.group for s in samples]
        assert order.index(0) < order.index(3)

        orchestrator.send(ScoreRequest(step=3, prompts=[PROMPT], completions=[[9, 9, 5]]))
        (scores,) = orchestrator.wait_for(Scores)
        assert (scores.step, scores.version, len(scores.logprobs[0])) == (3, 8, 3)
        stats = orchestrator.wait_for(GeneratorStats, 2)
        assert all(s.aborted == 0 and 0 <= s.busy_seconds <= s.seconds * 1.01 for s in stats)

        orchestrator.send(Stop())
        assert process.wait(timeout=60) == 0
        psutil.wait_procs(engine, timeout=5)
        assert [p for p in engine if p.is_running()] == []
    finally:
        process.kill()
        orchestrator.close()
        publisher.close()
