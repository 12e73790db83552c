"""The trainer's wait for the orchestrator."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from megatron_rl import messages as m
from megatron_rl.config import Timeouts
from megatron_rl.trainer.client import OrchestratorGone, TrainerClient
from tests.router import Router


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router()
    yield router
    router.close()


def client_of(router: Router, silence_seconds: float) -> TrainerClient:
    timeouts = Timeouts(silence_seconds=silence_seconds, batch_seconds=60)
    return TrainerClient(
        router.endpoint, timeouts, active_parameters=1, max_logprob_error=1.0, alive=lambda: None
    )


def test_an_orchestrator_that_is_stopped_is_named_and_then_given_up(router, capfd):
    start, limit = time.monotonic(), 0.5
    client = client_of(router, limit)
    with pytest.raises(OrchestratorGone, match=r"silent for \d+ s \(timeouts.silence_seconds\)"):
        client.next_batch(0)
    assert 4 * limit <= time.monotonic() - start < 30
    assert capfd.readouterr().err.count("the orchestrator is silent") == 1
    client.close()


def test_an_orchestrator_that_lives_is_waited_for(router):
    client = client_of(router, 1.0)
    received: list[m.AnyMessage] = []

    def serve() -> None:
        start = time.monotonic()
        while time.monotonic() - start < 5.0:
            if (message := router.receive(0.1)) is not None:
                received.append(message[1])
        router.send(m.TRAINER, m.Batch(step=0, stop=True))
        router.receive(0.5)

    thread = threading.Thread(target=serve)
    thread.start()
    assert client.next_batch(0).stop
    thread.join()
    client.close()
    assert [type(message) for message in received] == [m.Hello, m.BatchRequest]
