"""CPU seconds of a real small model's step by phase, with whole sequences and with shared prompts.

    python benchmarks/smollm_step.py --model SmolLM2-135M-Instruct [--rounds 3]

One trainer rank on one thread, fp32, a synthetic batch of 8 prompts of 66 tokens with 4 completions
of 11 to 35. A round trains the same batch both ways, whoever comes first alternating, and publishes
each update to shared memory. The lowest CPU time of the rounds is printed, which other programs on
the machine disturb least.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import commit, processor
from megatron_rl.messages import Batch
from megatron_rl.trainer.batch import batch_of_examples
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.publisher import Publisher
from megatron_rl.trainer.step import Trainer
from tests.trainer.cases import run_config, world_of_one

PROMPTS, GROUP, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 4, 66, (11, 36)
WAYS = {"whole sequences": False, "shared prompts": True}


def groups(step: int) -> Batch:
    """Return a batch of random tokens in groups of one prompt."""
    rng, examples = np.random.default_rng(step), []
    for _ in range(PROMPTS):
        prompt = rng.integers(0, 49152, PROMPT_TOKENS).tolist()
        for length in rng.integers(*COMPLETION_TOKENS, GROUP):
            examples.append((prompt, rng.integers(0, 49152, length).tolist()))
    return batch_of_examples(examples, weight=1 / 736)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = run_config(
        options.model, schedule__micro_batch_tokens=16384, optimizer__learning_rate=1e-5
    )
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    positions: dict[str, int] = {}

    def timed(way: str, phase: str, call: Callable[..., Any], *arguments: Any) -> Any:
        started = time.process_time()
        result = call(*arguments)
        seconds[phase, way].append(time.process_time() - started)
        return result

    with world_of_one(config):
        policy = Policy(config, options.model)
        trainer = Trainer(config, policy)
        publisher = Publisher(config, policy, "node", lambda manifest, seconds: None)
        publisher.publish(0)
        version = 0
        for number in range(options.rounds):
            order = list(WAYS) if number % 2 == 0 else list(reversed(WAYS))
            for way in order:
                policy.shares_prompts = WAYS[way]
                micro_batches, objective = timed(
                    way, "micro-batches", trainer.prepare, groups(number), 0
                )
                positions[way] = sum(m.tokens_BS.numel() for m in micro_batches)
                both = policy.forward_backward
                timed(way, "forward and backward", both, micro_batches, objective)
                timed(way, "optimizer", policy.apply, 1e-5)
                version += 1
                timed(way, "copy to the store", publisher.publish, version)
                timed(way, "difference and checksums (thread)", publisher.wait)
        publisher.close()
    print(f"{processor()}, load {os.getloadavg()[0]:.1f}, {time.strftime('%F')}, {commit()}\n")
    print(f"| CPU seconds of a step | {' | '.join(WAYS)} |\n|---|--:|--:|")
    print(f"| positions | {' | '.join(f'{positions[way]:,}' for way in WAYS)} |")
    for phase in dict.fromkeys(phase for phase, _ in seconds):
        values = (f"{min(seconds[phase, way]):.2f}" for way in WAYS)
        print(f"| {phase} | {' | '.join(values)} |")


if __name__ == "__main__":
    main()
