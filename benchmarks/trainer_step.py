"""Digests of trainer steps: is a step bitwise the same before and after a change of the code?

    python benchmarks/trainer_step.py --write before.json      # on the commit before the change
    python benchmarks/trainer_step.py --against before.json    # after it, on the same machine

Each digest covers gradients, metrics, probe log-probs and exported weights of two steps of a tiny
model, in fp32, on two gloo ranks. Rounding differs between processors and torch versions, so
digests are only comparable within one environment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import processor
from megatron_rl.messages import Batch
from megatron_rl.trainer import world
from megatron_rl.trainer.export import export
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.step import Trainer, next_batch
from tests.trainer.cases import batch, gradients, run_config, write_model

MODELS = ("tiny_dense", "tiny_scout")
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "TP2": {"parallel__tensor": 2, "parallel__sequence_parallel": True},
    "DP2": {},
    "EP2": {"parallel__expert": 2},
    "PP2": {"parallel__pipeline": 2},
    "CP2": {"parallel__context": 2, "parallel__distributed_optimizer": False},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "cispo": {},
    "gspo": {"algorithm__loss": "gspo"},
    "plain head": {"kernels__head": "plain"},
    "cispo with KL": {"algorithm__kl_coefficient": 0.1},
}
STEPS = 2


def cases() -> list[tuple[str, str, str]]:
    """Return (model, layout, objective) of every digest."""
    return [
        (model, layout, objective)
        for model in MODELS
        for layout in LAYOUTS
        for objective in OBJECTIVES
        if (model, layout) != ("tiny_dense", "EP2")
        # The objectives differ in the LM head, which TP2 and one rank cover.
        if layout in ("1 rank", "TP2") or objective in ("cispo", "gspo")
    ]


class Batches:
    """Rank 0's source of the batches."""

    def next_batch(self, step: int) -> Batch:
        """Return the batch of a step."""
        return batch(step, seed=step)


def digest_of(policy: Policy, trainer: Trainer) -> str:
    """Train and return the digest of all that the steps produced; complete on rank 0."""
    digest, apply = hashlib.sha256(), policy.apply

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in sorted(tensors):
            digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())

    def observed(learning_rate: float) -> float:
        add(gradients(policy))
        return apply(learning_rate)

    policy.apply = observed  # type: ignore[method-assign]
    source = Batches() if dist.get_rank() == 0 else None
    for step in range(STEPS):
        part, _ = next_batch(source, step, lambda: False, policy)
        done = trainer.train_step(part, step)
        metrics = {name: value.hex() for name, value in sorted(done.metrics.items())}
        probe = [[x.hex() for x in logprobs] for logprobs in done.probe_logprobs]
        digest.update(json.dumps([metrics, probe]).encode())
    add(dict(export(policy)))
    return digest.hexdigest()[:16]


def run_rank(rank: int, folder: Path) -> None:
    """Run all cases as one of two ranks; rank 0 writes the digests."""
    torch.set_num_threads(1)
    digests = {}
    for i, (model, layout, objective) in enumerate(cases()):
        size = 1 if layout == "1 rank" else 2
        if rank >= size:
            continue
        config = run_config(
            folder / model,
            size,
            output_dir=folder / f"out{i}",
            **LAYOUTS[layout],
            **OBJECTIVES[objective],
        )
        store = dist.HashStore() if size == 1 else dist.FileStore(str(folder / f"store{i}"), size)
        world.init_world(config, rank, size, store)
        policy = Policy(config, folder / model)
        digests[f"{model}, {layout}, {objective}"] = digest_of(policy, Trainer(config, policy))
        world.destroy_world()
    if rank == 0:
        (folder / "digests.json").write_text(json.dumps(digests))


def main() -> int:
    """Print the digests; compare them or write them, as the options say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the digests as JSON")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with such a file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in MODELS:
            write_model(folder / model, model)
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=run_rank, args=(rank, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        digests = json.loads((folder / "digests.json").read_text())
    before = json.loads(options.against.read_text())["digests"] if options.against else {}
    for case, digest in digests.items():
        verdict = ""
        if options.against:
            verdict = "same" if before.get(case) == digest else f"was {before.get(case)}"
        print(f"{case:40} {digest} {verdict}")
    if options.write:
        environment = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
        content = {
            "command": f"python benchmarks/trainer_step.py --write {options.write}",
            "processor": processor(),
            "date": str(date.today()),
            "environment": environment,
            "digests": digests,
        }
        options.write.write_text(json.dumps(content, indent=1) + "\n")
    return int(bool(options.against) and before != digests)


if __name__ == "__main__":
    sys.exit(main())
