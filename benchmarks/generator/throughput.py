"""Tokens per second of the generator, and the cost of updates, interruption and thread binding.

One engine with the miniature Scout (random weights, fp32) serves rounds of completions in one
process tree. Each figure is a median of interleaved rounds, because the machine's load varies, and
the ratios are to the first row of the same engine. Not measured: prompts longer than a block,
several engines, GPUs.

    python benchmarks/generator/throughput.py                        # quiet machine
    python benchmarks/generator/throughput.py --busy 2               # next to two busy processes
    VLLM_CPU_OMP_THREADS_BIND=auto python benchmarks/generator/throughput.py --busy 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

ROUNDS = 4
COMPLETIONS = 256
THINKING, ANSWER = 28, 6


def busy() -> None:
    """Load a core as a trainer does: small matrix products without end."""
    import torch

    torch.set_num_threads(1)
    a = torch.randn(256, 64)
    b = torch.randn(64, 192)
    while True:
        torch.nn.functional.silu(a @ b) @ b.T


async def one_round(engine, concurrency: int, thinking: int, answer: int, every: float, publish):
    """Return (tokens per second, per CPU second, share of interrupted completions, updates)."""
    admission = asyncio.Semaphore(concurrency)
    updates = []

    async def one(i: int):
        async with admission:
            return await engine.complete(
                [1, 8 + i % 9, 18, 9, 20, 10, 24, 4], thinking, answer, 1.0
            )

    async def keep_updating():
        while True:
            await asyncio.sleep(every)
            updates.append(await engine.update(publish()))

    updater = asyncio.create_task(keep_updating()) if every else None
    start, cpu_start = time.perf_counter(), cpu_seconds(engine)
    done = await asyncio.gather(*(one(i) for i in range(COMPLETIONS)))
    seconds, cpu = time.perf_counter() - start, cpu_seconds(engine) - cpu_start
    if updater is not None:
        updater.cancel()
    tokens = sum(len(c.token_ids) for c in done)
    forced = sum(c.forced != (0, 0) for c in done) / len(done)
    return tokens / seconds, tokens / cpu, forced, updates


def cpu_seconds(engine) -> float:
    """Return the processor time of this process and the engine's, which trainers lack."""
    times = [p.cpu_times() for p in [psutil.Process(), *engine._processes]]
    return sum(t.user + t.system for t in times)


async def main(arguments: argparse.Namespace) -> None:
    from megatron_rl.config import RunConfig
    from megatron_rl.data.prompt_format import save_tiny_tokenizer
    from megatron_rl.generator.process_environment import prepare_environment
    from megatron_rl.models.tiny import create

    folder = Path(tempfile.mkdtemp())
    model_dir = create("tiny_scout", folder / "model", save_tiny_tokenizer)
    config = RunConfig(
        model="tiny_scout",
        precision={"params": "fp32"},
        generation={
            "max_prompt_tokens": 32,
            "thinking_budget_tokens": (THINKING, THINKING),
            "answer_budget_tokens": ANSWER,
            "interruption_phrase": "</think>",
            "concurrent_completions": 128,
            "kv_cache_gib": 0.25,
        },
    )
    prepare_environment(config, str(model_dir))
    from safetensors.torch import load_file

    from megatron_rl.generator.engine import Engine
    from tests.weights.versions import Versions, as_sent

    weights = as_sent(load_file(model_dir / "model.safetensors"))
    versions = Versions(Path(tempfile.mkdtemp(dir="/dev/shm")))
    version = 0

    def publish():
        nonlocal version
        version += 1
        return versions.write(version, weights)

    start = time.perf_counter()
    engine = Engine(config, 0, str(model_dir))
    await engine.prepare()
    print(f"engine start {time.perf_counter() - start:.1f} s")
    rows = {
        "64 concurrent": (64, THINKING, ANSWER, 0.0),
        "128 concurrent": (128, THINKING, ANSWER, 0.0),
        "128, one request each": (128, THINKING + ANSWER, 0, 0.0),
        "128, update every 0.5 s": (128, THINKING, ANSWER, 0.5),
    }
    rates: dict[str, list[float]] = {name: [] for name in rows}
    per_cpu: dict[str, list[float]] = {name: [] for name in rows}
    forced: dict[str, float] = {}
    updates = []
    await one_round(engine, *next(iter(rows.values())), publish)
    for _ in range(ROUNDS):
        for name, row in rows.items():
            rate, cpu_rate, forced[name], took = await one_round(engine, *row, publish)
            rates[name].append(rate)
            per_cpu[name].append(cpu_rate)
            updates += took
    idle_start = cpu_seconds(engine)
    await asyncio.sleep(3.0)
    idle = (cpu_seconds(engine) - idle_start) / 3.0
    engine.stop()
    versions.close()
    first = statistics.median(next(iter(rates.values())))
    result = {
        "bind": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
        "busy_processes": arguments.busy,
        "tokens_per_second": {n: round(statistics.median(r)) for n, r in rates.items()},
        "ratio_to_first": {n: round(statistics.median(r) / first, 3) for n, r in rates.items()},
        "tokens_per_cpu_second": {n: round(statistics.median(r)) for n, r in per_cpu.items()},
        "cores_used_when_idle": round(idle, 3),
        "forced_share": {n: round(x, 3) for n, x in forced.items()},
        "updates": len(updates),
        "pause_ms": round(1e3 * statistics.median(u.pause_seconds for u in updates), 1),
        "transfer_ms": round(1e3 * statistics.median(u.transfer_seconds for u in updates), 1),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, default=0, help="processes that keep a core busy")
    parsed = parser.parse_args()
    hogs = [multiprocessing.Process(target=busy, daemon=True) for _ in range(parsed.busy)]
    for hog in hogs:
        hog.start()
    try:
        asyncio.run(main(parsed))
    finally:
        for hog in hogs:
            hog.kill()
