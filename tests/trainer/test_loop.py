"""The trainer's loop against a scripted orchestrator: order of events, stop, interrupt, resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl import messages
from megatron_rl.config import RunConfig
from megatron_rl.train import train_loop
from megatron_rl.trainer import checkpoint, checkpoint_folder
from megatron_rl.trainer.export import export
from megatron_rl.trainer.model import Policy
from tests.trainer.cases import batch, run_config, world_of_one, write_model


class Orchestrator:
    """The edge: hands out batches and notes what it hears."""

    def __init__(self, last: int, save_at: tuple[int, ...] = ()) -> None:
        self.last, self.save_at = last, save_at
        self.events: list[str] = []
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.done_message: messages.TrainerDone | None = None

    def next_batch(self, step: int) -> messages.Batch:
        self.events.append(f"next {step}")
        if step == self.last:
            return messages.Batch(
                step=step, stop=True, **dict.fromkeys(self._arrays(), b""), probe=[]
            )
        return batch(step, seed=step, save=step in self.save_at)

    @staticmethod
    def _arrays() -> tuple[str, ...]:
        return (
            *("bounds", "prompt_lengths", "token_ids", "advantages"),
            *("generator_logprobs", "loss_weights", "versions"),
        )

    def step_done(self, done: messages.StepDone, wait_seconds: float) -> None:
        assert wait_seconds >= 0
        assert done.train_seconds > 0
        self.events.append(f"done {done.step}")

    def send(self, message: messages.Message) -> None:
        assert isinstance(message, messages.TrainerDone)
        self.events.append(f"end {message.step}")
        self.done_message = message

    def save_state(self, step: int, directory: str) -> None:
        self.events.append(f"save {step}")
        (Path(directory) / "orchestrator.json").write_text(json.dumps({"step": step}))


class Versions:
    """The publisher of a run: keeps the weights of every version with the client's events."""

    def __init__(self, policy: Policy, client: Orchestrator) -> None:
        self.policy, self.client = policy, client

    def publish(self, version: int) -> None:
        self.client.events.append(f"published {version}")
        self.client.weights[version] = dict(export(self.policy))

    def wait(self) -> None:
        self.client.events.append("complete")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[RunConfig, Path]]:
    directory = write_model(tmp_path / "hf", "tiny_dense")
    # The batches' log-probs are random numbers.
    own = {"output_dir": tmp_path / "out", "metrics__max_logprob_error": 1e6}
    config = run_config(directory, **own)
    with world_of_one(config):
        yield config, directory


def trained(run: tuple[RunConfig, Path], client: Orchestrator, **options: Any) -> Policy:
    config, directory = run
    policy = Policy(config, directory)
    start = 0
    if complete := checkpoint_folder.find_complete(checkpoint_folder.folder(config)):
        start = checkpoint.load(config, policy, complete[0])
    train_loop(
        config,
        policy,
        client,
        publisher=Versions(policy, client),
        start_step=start,
        stop_requested=options.get("stop_requested", lambda: False),
    )
    return policy


def test_events_come_in_order_and_the_end_is_saved_twice(run: tuple[RunConfig, Path]) -> None:
    client = Orchestrator(last=2, save_at=(1,))
    trained(run, client)
    assert client.events == [
        *("published 0", "next 0", "done 0", "published 1"),
        *("next 1", "save 1", "done 1", "published 2"),
        *("next 2", "save 2", "complete", "end 2"),
    ]
    assert client.done_message == messages.TrainerDone(step=2, interrupted=False)
    config, directory = run
    latest = checkpoint_folder.find_complete(checkpoint_folder.folder(config))[0]
    assert json.loads((latest / "orchestrator.json").read_text()) == {"step": 2}
    final = load_file(config.output_dir / "final" / "model.safetensors")
    assert all(torch.equal(final[n], client.weights[2][n]) for n in final)
    start = load_file(directory / "model.safetensors")
    assert all(torch.equal(start[n], client.weights[0][n]) for n in start)
    assert not torch.equal(client.weights[1]["lm_head.weight"], client.weights[2]["lm_head.weight"])


def test_an_interrupted_and_resumed_run_ends_with_the_same_weights(
    run: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    config, directory = run
    whole = Orchestrator(last=4)
    trained(run, whole)

    broken = config.model_copy(update={"output_dir": tmp_path / "broken"})
    first = Orchestrator(last=4)
    trained((broken, directory), first, stop_requested=lambda: first.events.count("next 2") > 0)
    # The batch of step 2 was not trained: the checkpoint is of step 2, and 2 is asked for again.
    assert first.events[-3:] == ["save 2", "complete", "end 2"]
    assert first.done_message == messages.TrainerDone(step=2, interrupted=True)
    assert not (broken.output_dir / "final").exists()

    second = Orchestrator(last=4)
    trained((broken, directory), second)
    assert second.events[:3] == ["published 2", "next 2", "done 2"]
    for name, tensor in whole.weights[4].items():
        assert torch.equal(tensor, second.weights[4][name]), name


def test_an_interrupt_with_the_last_batch_is_an_interrupt(run: tuple[RunConfig, Path]) -> None:
    client = Orchestrator(last=0)
    trained(run, client, stop_requested=lambda: True)
    assert client.done_message == messages.TrainerDone(step=0, interrupted=True)
    assert client.events == ["published 0", "next 0", "save 0", "complete", "end 0"]
