"""A trainer of one rank in its own process, which takes commands over a connection.

`python -m tests.generator.trainer_process ADDRESS`; every command is answered by one object, or by
the text of a `WeightsError` after the word "refused".
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl import messages
from megatron_rl.weights.manifest import WeightsError
from tests.trainer.cases import batch, run_config


@dataclass
class TrainerOfOne:
    """The commands."""

    directory: str
    version: int
    """Of the start; every step makes the next."""
    params: str = "fp32"
    """`precision.params`."""

    def __post_init__(self) -> None:
        from megatron_rl.trainer.model import Policy
        from megatron_rl.trainer.step import Trainer
        from megatron_rl.trainer.world import init_world

        config = run_config(
            self.directory, optimizer__learning_rate=3e-3, precision__params=self.params
        )
        init_world(config, 0, 1, dist.HashStore())
        self.config, self.policy = config, Policy(config, self.directory)
        self.trainer = Trainer(config, self.policy)
        self.publisher: Any = None

    def open(self, weights: dict[str, Any]) -> None:
        """Publish by this `weights` section from now on."""
        from megatron_rl.trainer.publisher import Publisher

        self.close()
        tree = self.config.model_dump(mode="json")
        tree["weights"] |= weights
        self.config = type(self.config).model_validate(tree)
        self.announced: list[Any] = []
        self.publisher = Publisher(
            self.config, self.policy, "node", lambda manifest, _: self.announced.append(manifest)
        )

    def train(self) -> None:
        """One optimizer step."""
        self.trainer.train_step(batch(self.version, seed=self.version), self.version)
        self.version += 1

    def publish(self) -> Any:
        """Publish the weights held now; return the manifest."""
        self.publisher.publish(self.version)
        self.publisher.wait()
        return self.announced[-1]

    def score(self, examples: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Log-probs of completions under the weights held now."""
        from megatron_rl.trainer.batch import (
            batch_of_examples,
            completion_positions,
            micro_batches_of,
        )

        examples_batch = batch_of_examples(examples)
        micro_batches = micro_batches_of(examples_batch, self.policy)
        self.policy.forward_backward(micro_batches, None)
        flat = np.zeros(len(examples_batch.token_ids) // 4)
        for micro in micro_batches:
            flat[micro.source_T.numpy()] = micro.logprobs_T.numpy()
        positions = [completion_positions(examples_batch, i) for i in range(len(examples))]
        return [flat[p].tolist() for p in positions]

    def metrics(self, message: messages.Batch, routing_replay: str) -> dict[str, float]:
        """Of a step with this batch that is not applied, with `algorithm.routing_replay`."""
        from megatron_rl.trainer.router_replay import Routing

        policy = self.policy
        policy.routing = Routing(policy.modules, policy.architecture, routing_replay)
        tree = self.config.model_dump(mode="json")
        tree["algorithm"]["routing_replay"] = routing_replay
        self.trainer.config = policy.run = type(self.config).model_validate(tree)
        from megatron_rl.trainer.step_metrics import report

        micro_batches, objective = self.trainer.prepare(message, message.step)
        policy.forward_backward(micro_batches, objective)
        return report(message, micro_batches, objective, policy)[0]

    def weights(self) -> dict[str, Any]:
        """All weights by the checkpoint's names, as numpy arrays."""
        from megatron_rl.trainer.export import export

        return {name: tensor.numpy() for name, tensor in export(self.policy)}

    def close(self) -> None:
        """End the publisher."""
        if self.publisher is not None:
            self.publisher.close()
        self.publisher = None


def serve(address: str) -> None:
    """Answer commands until the other side hangs up."""
    from megatron_rl.trainer.world import destroy_world

    torch.set_num_threads(1)
    trainer: TrainerOfOne | None = None
    with Client(address) as connection:
        while True:
            try:
                name, arguments = connection.recv()
            except EOFError:
                break
            try:
                if name == "start":
                    if trainer is not None:
                        trainer.close()
                        destroy_world()
                    trainer, answer = TrainerOfOne(*arguments), None
                else:
                    answer = getattr(trainer, name)(*arguments)
            except WeightsError as e:
                answer = ("refused", str(e))
            connection.send(answer)
    if trainer is not None:
        trainer.close()
        destroy_world()


if __name__ == "__main__":
    assert Path(sys.argv[1]).exists(), "the test listens first"
    serve(sys.argv[1])
