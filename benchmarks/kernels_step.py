"""CPU seconds of a trainer step by the fused and by the plain head, interleaved in one process.

    python benchmarks/kernels_step.py      # the model and the step of examples/scalerl_tiny.yaml

One rank does all of the step; the batch is made up, with the example's numbers and lengths.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl import messages
from megatron_rl.config import RunConfig, load_config
from megatron_rl.models import tiny
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.step import Trainer
from megatron_rl.trainer.world import destroy_world, init_world

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "scalerl_tiny.yaml"


def batch(config: RunConfig, vocabulary: int, step: int) -> messages.Batch:
    """Random tokens in the numbers and lengths of a step of this run."""
    rng = np.random.default_rng(step)
    g, s = config.generation, config.schedule
    n = s.prompts_per_step * s.completions_per_prompt
    prompts = rng.integers(g.max_prompt_tokens // 2, g.max_prompt_tokens, n)
    completions = rng.integers(g.completion_tokens // 2, g.completion_tokens, n)
    bounds = np.concatenate([[0], np.cumsum(prompts + completions)])
    size = int(bounds[-1])
    inside = np.arange(size) - np.repeat(bounds[:-1], prompts + completions)
    sampled = inside >= np.repeat(prompts, prompts + completions)
    floats = {
        "advantages": np.repeat(rng.normal(size=n), prompts + completions) * sampled,
        "generator_logprobs": -3.5 * sampled,
        "loss_weights": sampled / sampled.sum(),
    }
    return messages.Batch(
        step=step,
        bounds=bounds.astype("<i4").tobytes(),
        prompt_lengths=prompts.astype("<i4").tobytes(),
        token_ids=rng.integers(0, vocabulary, size).astype("<i4").tobytes(),
        versions=np.where(sampled, step, -1).astype("<i4").tobytes(),
        probe=[0],
        **{name: values.astype("<f4").tobytes() for name, values in floats.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=EXAMPLE)
    parser.add_argument("--steps", type=int, default=40, help="of each head")
    a = parser.parse_args()
    one = ["--roles.trainer_ranks", "1", "--parallel.expert", "1", "--parallel.tensor", "1"]
    seconds: dict[str, list[float]] = {"fused": [], "plain": []}
    with tempfile.TemporaryDirectory() as folder:
        configs = {h: load_config(a.config, [*one, "--kernels.head", h]) for h in seconds}
        directory = Path(folder) / "model"
        tiny.create(configs["fused"].model, directory)
        torch.set_num_threads(1)
        init_world(configs["fused"], 0, 1, dist.HashStore())
        policies = {h: Policy(c, directory) for h, c in configs.items()}
        trainers = {h: Trainer(configs[h], policies[h]) for h in seconds}
        vocabulary = policies["fused"].architecture.vocabulary
        for step in range(-2, a.steps):  # two to warm up
            given = batch(configs["fused"], vocabulary, max(step, 0))
            # Whoever comes first finds the caches cold.
            for head, trainer in sorted(trainers.items(), reverse=step % 2 == 1):
                started = time.process_time()
                trainer.train_step(given, max(step, 0))
                if step >= 0:
                    seconds[head].append(time.process_time() - started)
        destroy_world()
    for head, spent in seconds.items():
        print(
            f"{head}: CPU milliseconds of a step: best {min(spent) * 1e3:.1f}, median"
            f" {statistics.median(spent) * 1e3:.1f}, {len(spent)} steps"
        )


if __name__ == "__main__":
    main()
