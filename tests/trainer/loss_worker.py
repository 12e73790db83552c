"""Two gloo ranks of `test_loss.py` that train a step by the fused and by the plain head.

Rank 0 writes the differences.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.trainer import world
from megatron_rl.trainer.export import export
from megatron_rl.trainer.loss import Objective
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.step import Trainer
from tests.sums import sum_error
from tests.trainer.cases import absolute_terms, batch, gradients, run_config

SP = {"parallel__tensor": 2, "parallel__sequence_parallel": True}
OVERLAP = {"parallel__overlap_grad_reduce": True, "parallel__overlap_param_gather": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense TP2": ("dense", {"parallel__tensor": 2}),
    "dense TP2 SP": ("dense", SP),
    "dense PP2": ("dense", {"parallel__pipeline": 2}),
    "dense CP2": ("dense", {"parallel__context": 2}),
    "dense DP2 overlap": ("dense", OVERLAP),
    "scout EP2 overlap": ("scout", {"parallel__expert": 2, **OVERLAP}),
    "tied TP2": ("tied", {"parallel__tensor": 2}),
    "tied PP2": ("tied", {"parallel__pipeline": 2}),
    "scout EP2": ("scout", {"parallel__expert": 2}),
    "scout TP2 SP": ("scout", SP),
}
"""Name -> (model, options)."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "row kernel": {},
    "one pass": {
        "algorithm__loss": {"kind": "ppo_clip"},
        "algorithm__old_policy": "trainer",
        "algorithm__correction": {"kind": "token_truncation", "max_ratio": 1.1},
        "algorithm__kl_coefficient": 0.1,
    },
    "two passes": {"algorithm__loss": {"kind": "gspo", "min_ratio": 0.9, "max_ratio": 1.1}},
}
"""By the way that the fused head computes them."""
CASES = [
    (layout, way)
    for layout in LAYOUTS
    for way in ALGORITHMS
    if way == "row kernel" or layout in ("dense TP2", "dense PP2", "dense CP2", "scout EP2")
]
"""What is compared: every layout, and every way in the layouts that differ most."""


def step(config: Any, directory: Path, terms: bool = False) -> tuple[Any, ...]:
    """(way, metrics, probe, gradients, weights after the step) of one trainer step; on rank 0."""
    policy = Policy(config, directory)
    run, apply, way = policy._forward_backward, policy.apply, Objective.method
    seen: dict[str, Any] = {}
    # Every rank gets all gradients, where the distributed optimizer leaves it a shard of them.
    policy._forward_backward = lambda **kw: run(**kw, force_all_reduce=not kw["forward_only"])
    for chunk in policy.chunks:  # and where hooks reduce them
        chunk.force_all_reduce = True

    def observed(rate: float) -> float:
        seen["gradients"] = gradients(policy)
        return apply(rate)

    def observed_way(objective: Objective, kind: Any) -> Any:
        seen["way"] = way(objective, kind)
        return seen["way"]

    policy.apply = observed  # type: ignore[method-assign]
    Objective.method = observed_way  # type: ignore[method-assign]
    try:
        with absolute_terms(policy) if terms else nullcontext() as sums:
            done = Trainer(config, policy).train_step(batch(sequences=9), 0)
        seen["gradients"] = sums or seen["gradients"]
    finally:
        Objective.method = way  # type: ignore[method-assign]
    # The probe and the way are the last stage's; rank 1 is in it in every layout.
    said = [seen.get("way", "")]
    dist.broadcast_object_list(said, src=1)
    return said[0], done.metrics, done.probe_logprobs, seen["gradients"], dict(export(policy))


def apart(
    fused: tuple[Any, ...], plain: tuple[Any, ...], terms: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the largest differences; those of gradients by tensor and per absolute terms."""
    way, metrics, probe, grads, weights = fused
    _, metrics_2, probe_2, grads_2, weights_2 = plain
    return {
        "way": way,
        "metrics": {n: abs(metrics[n] - metrics_2[n]) for n in metrics_2},
        "probe": max(
            abs(x - y)
            for a, b in zip(probe, probe_2, strict=True)
            for x, y in zip(a, b, strict=True)
        ),
        "gradients": {n: sum_error(grads[n], grads_2[n], terms[n]) for n in terms},
        "weights": max(float((weights[n] - weights_2[n]).abs().max()) for n in weights_2),
        "least gradient": min(float(gradient.norm()) for gradient in grads_2.values()),
    }


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    terms: dict[tuple[str, str], Any] = {}  # of the first layout of a model
    for i, (layout, (model, options)) in enumerate(LAYOUTS.items()):

        def config(kind: str, algorithm: dict[str, Any], options: Any = options) -> Any:
            return run_config(
                folder / model,  # noqa: B023
                2,
                output_dir=folder / f"out{i}",  # noqa: B023
                kernels__head=kind,
                # Adam's step is nearly proportional to gradients that are small beside this.
                optimizer__eps=1e-2,
                **options,
                **algorithm,
            )

        store = dist.FileStore(str(folder / f"store{i}"), 2)
        try:
            world.init_world(config("fused", {}), rank, 2, store)
        except ValueError as error:
            found[layout] = str(error)
            continue
        found[layout] = {}
        for name, algorithm in ALGORITHMS.items():
            if (layout, name) not in CASES:
                continue
            pair = [step(config(kind, algorithm), folder / model) for kind in ("fused", "plain")]
            if (model, name) not in terms:
                single = config("plain", {**algorithm, "schedule__micro_batch_tokens": 1})
                *_, terms[model, name], _ = step(single, folder / model, terms=True)
            if rank == 0:
                found[layout][name] = apart(*pair, terms[model, name])
        world.destroy_world()
    if rank == 0:
        torch.save(found, folder / "found.pt")
