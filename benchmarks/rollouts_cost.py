"""CPU time that rollout files cost a run, as a share of its steps.

    python benchmarks/rollouts_cost.py RUN [--ranks 2]

Every file of a step of RUN is written again, by the same code with the run's tokenizer, and the
processor time of all threads is set against `step_seconds` of the same step in RUN's metrics.jsonl.
So is the time in which trainer ranks hand over ratios and entropies of as many tokens, in processes
that do nothing else. Both are CPU seconds, which a busy machine does not change much; the steps of
RUN are its wall time on the machine it ran on, which a busy machine makes longer.
"""

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_rl import messages as m
from megatron_rl.commands.view.page import run_tokenizer
from megatron_rl.config.sections import Metrics
from megatron_rl.metrics import read_metrics, read_rollouts
from megatron_rl.metrics.rollouts import RolloutWriter
from megatron_rl.trainer import world
from megatron_rl.trainer.step import token_results

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import processor

ARRAYS = {"prompt_token_ids": "<i4", "token_ids": "<i4", "logprobs": "<f4", "ratios": "<f4",
          "entropies": "<f4"}  # fmt: skip
ROUNDS = 5


def rows_of(path):
    """Return the rows of a file as the orchestrator gives them to the writer."""
    rows = read_rollouts(path).to_pylist()
    for row in rows:
        for name, kind in ARRAYS.items():
            row[name] = None if row[name] is None else np.array(row[name], kind).tobytes()
        versions = np.array(row["versions"])
        starts = np.flatnonzero(np.diff(versions, prepend=-1))
        lengths = np.diff(starts, append=len(versions))
        row["versions"] = list(zip(versions[starts].tolist(), lengths.tolist(), strict=True))
    return rows


def written(writer, step, rows):
    """Return the CPU seconds in which a file is written."""
    before = time.process_time()
    writer.write("step", step, rows)
    while writer.check():
        time.sleep(0.002)
    return time.process_time() - before


def handed_over(rank, ranks, tokens, store, results):
    """Measure `token_results` of a batch with so many completion tokens, in one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    world._control[:] = [dist.group.WORLD] * 2
    own = torch.arange(rank, tokens, ranks) + 1
    names = ("logprobs_T", "generator_logprobs_T", "entropy_T")
    micro = SimpleNamespace(source_T=own, **{name: torch.rand(len(own)) for name in names})
    batch = m.Batch(step=0, bounds=m.int_bytes([0, tokens + 1]), prompt_lengths=m.int_bytes([1]))
    shards = SimpleNamespace(run=SimpleNamespace(metrics=Metrics()), reports=True)
    seconds = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        before = time.process_time()
        ratios, entropies = token_results(batch, [micro], shards)
        if rank == 0:
            done = m.StepDone(
                step=0, metrics={}, probe_logprobs=[], wait_seconds=0.0, train_seconds=0.0,
                ratios=ratios, entropies=entropies,
            )  # fmt: skip
            m.decode(m.encode(done))
        seconds.append(time.process_time() - before)
    results[rank] = statistics.median(seconds[1:])
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--ranks", type=int, default=2, help="trainer ranks [2]")
    options = parser.parse_args()
    steps = {r["step"]: r for r in read_metrics(options.run / "metrics.jsonl")
             if r["kind"] == "step"}  # fmt: skip
    tokenizer = run_tokenizer(options.run)
    shares, tokens, size = [], [], 0
    with tempfile.TemporaryDirectory() as work:
        writer = RolloutWriter(
            Path(work) / "files", 1e12, lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        )
        for path in sorted((options.run / "rollouts").glob("step_*.parquet")):
            rows, step = rows_of(path), int(path.stem[5:])
            shares.append((written(writer, step, rows), steps[step]["step_seconds"]))
            tokens.append(sum(len(row["token_ids"]) // 4 for row in rows))
            size += path.stat().st_size
        trained = int(statistics.median(row["tokens_trained"] for row in steps.values()))
        with mp.Manager() as manager:
            results = manager.dict()
            given = (options.ranks, trained, f"{work}/store", results)
            mp.spawn(handed_over, given, nprocs=options.ranks)
            handing = max(results.values())
    writing, step = (statistics.median(one) for one in zip(*shares, strict=True))
    share = (writing + handing) / step
    print(
        f"{datetime.date.today()}, {processor()}, {platform.system()}\n\n"
        f"| median of {len(shares)} steps | |\n|---|---|\n"
        f"| step of the run | {step:.3f} s |\n"
        f"| completion tokens of a step | {statistics.median(tokens):,.0f}, {trained:,} trained |\n"
        f"| writing its file, CPU | {writing * 1e3:.1f} ms |\n"
        f"| handing over ratio and entropy, CPU of a rank | {handing * 1e3:.1f} ms |\n"
        f"| both, as a share of the step | {share:.2%} |\n"
        f"| of the processor time of its {os.cpu_count()} cores | {share / os.cpu_count():.2%} |\n"
        f"| disk per token | {size / sum(tokens):.1f} bytes |"
    )


if __name__ == "__main__":
    main()
