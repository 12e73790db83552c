"""What a version costs an engine: decoding while it travels, and the pause of a swap.

    python benchmarks/weights_engine.py [--model FOLDER] [--rounds 8] [--mib 256] [--rate 50]

One vLLM CPU engine, by default with the miniature Scout.

- Decoding: rounds with and without a version on its way to the store of the same node, in turn. The
  trainer's store, its process and the receiving store share this machine's cores with the engine;
  in a run, the trainer's are on another node, so the loss is an upper bound. `--mib` and `--rate`
  (MB/s) make a transfer longer than a round.
- Pause: swaps while requests are decoding, against loads alone: the same swaps in an idle engine,
  of which the time in `load_weights` counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

THINKING, ANSWER = 28, 6
CONCURRENT = 64


def traffic(mib: float, rate: float) -> None:
    """Write a version and say `ready`; on a line from stdin announce it, and then say `taken`."""
    import torch

    from tests.weights.fleet import TRAINER, Fleet

    folder = Path(tempfile.mkdtemp(prefix="weights_", dir="/dev/shm"))
    fleet = Fleet(folder, 1, 2**20, peer_seconds=60, transports=None)
    try:
        fleet.start_all({TRAINER: 0.0, "store-0": rate * 1e6})
        for version in range(1, 1000):
            generator = torch.Generator().manual_seed(version)
            tensors = {
                f"t{i}": torch.randn(2**19, generator=generator).bfloat16() for i in range(int(mib))
            }
            manifest = fleet.versions.write(version, tensors)
            print("ready", flush=True)
            if not sys.stdin.readline():
                return
            fleet.announce(manifest)
            fleet.until_taken(["store-0"], 600)
            print("taken", flush=True)
    finally:
        fleet.close()
        shutil.rmtree(folder, ignore_errors=True)


class Traffic:
    """The other process of `traffic`."""

    def __init__(self, mib: float, rate: float) -> None:
        command = [sys.executable, __file__, "--traffic", "--mib", str(mib), "--rate", str(rate)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def wait(self, word: str) -> None:
        """Wait until it says this."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.strip() == word, f"{line!r} instead of {word}"

    def go(self) -> None:
        """Let the version travel."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it, and with it its stores."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


async def decode(engine: Any, completions: int) -> float:
    """Return tokens per second."""
    admission = asyncio.Semaphore(CONCURRENT)

    async def one(i: int) -> int:
        async with admission:
            prompt = [1, 8 + i % 9, 18, 9, 20, 10, 24, 4]
            return len((await engine.complete(prompt, THINKING, ANSWER, 1.0)).token_ids)

    start = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(i) for i in range(completions))))
    return tokens / (time.perf_counter() - start)


async def decoding(engine: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare rounds of decoding with and without a version on its way."""
    traffic = Traffic(arguments.mib, arguments.rate)
    alone, travelling = [], []
    try:
        await asyncio.to_thread(traffic.wait, "ready")
        await decode(engine, arguments.completions)
        for _ in range(arguments.rounds):
            alone.append(await decode(engine, arguments.completions))
            traffic.go()
            taken = asyncio.create_task(asyncio.to_thread(traffic.wait, "taken"))
            travelling.append(await decode(engine, arguments.completions))
            if taken.done():
                raise SystemExit("the version was there before the round ended: raise --mib")
            await taken
            await asyncio.to_thread(traffic.wait, "ready")
    finally:
        traffic.close()
    ratios = [b / a for a, b in zip(alone, travelling, strict=True)]
    return {
        "tokens_per_second_alone": statistics.median(alone),
        "tokens_per_second_while_a_version_travels": statistics.median(travelling),
        "ratio_of_medians": statistics.median(travelling) / statistics.median(alone),
        "ratios_by_round": ratios,
    }


async def pauses(engine: Any, model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the pause of swaps under load with loads in an idle engine."""
    from safetensors.torch import load_file

    from tests.weights.versions import Versions, as_sent

    folder = Path(tempfile.mkdtemp(prefix="weights_", dir="/dev/shm"))
    versions = Versions(folder / "trainer", 64 * 2**20)
    tensors = as_sent(load_file(model / "model.safetensors"))
    busy, idle = [], []
    try:
        for version in range(1, 2 * arguments.rounds + 3):
            manifest = versions.write(version, tensors)
            requests: list[asyncio.Task[float]] = []
            if version % 2:
                requests = [asyncio.create_task(decode(engine, arguments.completions))]
                await asyncio.sleep(0.2)
            update = await engine.update(manifest)
            if version > 2:  # the first ones map the memory
                (busy if version % 2 else idle).append(update)
            assert bool(update.requests_in_flight) == bool(requests)
            await asyncio.gather(*requests)
    finally:
        versions.close()
        shutil.rmtree(folder, ignore_errors=True)
    pause = statistics.median(u.pause_seconds for u in busy)
    load = statistics.median(u.transfer_seconds for u in idle)
    return {
        "version_bytes": manifest.num_bytes,
        "requests_in_flight": statistics.median(u.requests_in_flight for u in busy),
        "pause_seconds": pause,
        "load_seconds_in_the_pause": statistics.median(u.transfer_seconds for u in busy),
        "load_seconds_alone": load,
        "pause / load": pause / load,
    }


async def measure(arguments: argparse.Namespace) -> None:
    """Start the engine and measure both."""
    from megatron_rl.config import RunConfig
    from megatron_rl.data.prompt_format import save_tiny_tokenizer
    from megatron_rl.generator.process_environment import prepare_environment
    from megatron_rl.models.tiny import create

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = arguments.model or create("tiny_scout", folder / "model", save_tiny_tokenizer)
        config = RunConfig(
            model=str(model),
            precision={"params": "fp32"},
            generation={
                "max_prompt_tokens": 32,
                "thinking_budget_tokens": (THINKING, THINKING),
                "answer_budget_tokens": ANSWER,
                "interruption_phrase": "</think>",
                "concurrent_completions": CONCURRENT,
                "kv_cache_gib": 0.25,
            },
        )
        prepare_environment(config, str(model))
        from megatron_rl.generator.engine import Engine

        engine = Engine(config, 0, str(model))
        await engine.prepare()
        try:
            result = {
                "model": model.name if arguments.model else "miniature Scout, fp32",
                "decoding": await decoding(engine, arguments),
                "pause": await pauses(engine, model, arguments),
            }
        finally:
            engine.stop()
    report(result, arguments)


def report(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write the page."""
    from weights import write_result

    decoding, pause = result["decoding"], result["pause"]
    lines = [
        "# What a weight version costs an engine",
        f"{result['model']}, {CONCURRENT} requests at once, {arguments.rounds} rounds of each kind"
        f" in turn, medians. A version on its way: {arguments.mib:g} MiB, {arguments.rate:g} MB/s.",
        "",
        "| | |",
        "|---|--:|",
        f"| tokens/s alone | {decoding['tokens_per_second_alone']:.0f} |",
        "| tokens/s while a version travels |"
        f" {decoding['tokens_per_second_while_a_version_travels']:.0f} |",
        f"| ratio (goal: at least 0.95) | {decoding['ratio_of_medians']:.3f} |",
        f"| ratios, round by round | {' '.join(f'{r:.2f}' for r in decoding['ratios_by_round'])} |",
        f"| bytes of the version that is swapped in | {pause['version_bytes']} |",
        f"| pause, {pause['requests_in_flight']:.0f} requests in flight |"
        f" {1e3 * pause['pause_seconds']:.1f} ms |",
        f"| of it in `load_weights` | {1e3 * pause['load_seconds_in_the_pause']:.1f} ms |",
        f"| `load_weights` in an idle engine | {1e3 * pause['load_seconds_alone']:.1f} ms |",
        f"| ratio (goal: at most 1.2) | {pause['pause / load']:.2f} |",
    ]
    write_result("engine", result, lines, arguments.note)


def main() -> None:
    """Measure, or be the other process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--completions", type=int, default=512, help="of a round")
    parser.add_argument("--mib", type=float, default=256, help="of the version that travels")
    parser.add_argument("--rate", type=float, default=50, help="MB/s at which it travels")
    parser.add_argument("--note", default="quiet", help="how busy the machine was")
    parser.add_argument("--traffic", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.traffic:
        traffic(arguments.mib, arguments.rate)
    else:
        asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
