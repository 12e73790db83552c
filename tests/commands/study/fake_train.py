"""Stands for `megatron-rl`: runs that learn on a sigmoid, and stop and resume as real ones.

As a command, a step takes 0.05 s, SIGINT ends the run with a checkpoint, and --resume continues
from it; `called.txt` next to the runs lists the calls.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from megatron_rl.config import load_config, save_config
from megatron_rl.metrics.metrics_file import MetricsWriter

EVALUATED = (0, 4, 8, 12, 18, 26, 40)
TOKENS_PER_STEP = 100.0


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(f"--{name}") + 1]


def train(arguments: list[str], stop: Callable[[int], bool], middle: float = 1000.0) -> int:
    """Write the files of a run up to its last step; returns its exit status."""
    resume = arguments[-1] == "--resume"
    words = arguments[3 : len(arguments) - resume]
    config = load_config(option(arguments, "config"), words)
    output, steps = config.output_dir, config.schedule.steps
    save_config(config)
    checkpoints = sorted((output / "checkpoints").glob("step_*"))
    first = int(checkpoints[-1].name[5:]) if resume else 0
    interrupted = False
    with closing(
        MetricsWriter(output / "metrics.jsonl", resume_step=first if resume else None)
    ) as writer:
        for step in range(first, steps + 1):
            if step in EVALUATED and not (resume and step == first):
                tokens = max(TOKENS_PER_STEP * step, 1e-9)
                rate = 0.3 + 0.5 / (1 + (middle / tokens) ** 1.3) + 0.002 * config.seed
                row = {"pass_rate": rate, "pass_rate_stderr": 0.01, "compute_device_hours": tokens}
                writer.write(
                    "eval", {"step": step, "compute_train_tokens": TOKENS_PER_STEP * step, **row}
                )
            if step == steps:
                break
            compute = {
                "compute_tokens": TOKENS_PER_STEP * (step + 1),
                "compute_train_tokens": TOKENS_PER_STEP * (step + 1),
                "wall_seconds": 3.0 * step + 3,
            }
            writer.write("step", {"step": step, **compute, "loss": 0.0})
            if stop(step + 1):
                interrupted = True
                folder = output / "checkpoints" / f"step_{step + 1:06}"
                folder.mkdir(parents=True)
                (folder / "trainer.json").write_text("{}")
                break
    summary = {"steps": step + interrupted, "run": {"interrupted": interrupted}}
    (output / "summary.json").write_text(json.dumps(summary))
    return 0


def sft(arguments: list[str]) -> int:
    """Write the start checkpoint of the supervised stage."""
    config = load_config(option(arguments, "config"), arguments[3:])
    start = config.output_dir / "start" / config.model
    start.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (start / name).write_text("{}")
    return 0


if __name__ == "__main__":
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    command = sys.argv[1:]
    with Path("called.txt").open("a") as file:
        file.write(" ".join(command) + "\n")

    def slow(step: int) -> bool:
        time.sleep(0.05)
        return bool(interrupts)

    sys.exit(sft(command) if command[0] == "sft" else train(command, slow))
