"""One of four gloo processes that compute the gradients of many algorithms in many layouts.

Started by `test_layouts.py`. All losses, all aggregations, the KL term (whose reference is a pass
of its own) and the entropy term: the same batch on one rank, over 4 data-parallel ranks, 2
tensor-parallel or context-parallel ranks and 2 pipeline stages, and over both of two kinds, packed
and padded, in several micro-batch splits and in another order of its groups. Rank 0 writes the
distances.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.orchestrator.batching import build_batch
from megatron_rl.orchestrator.groups import Group
from megatron_rl.rewards import Outcome, Verdict
from tests.segments import segments
from tests.trainer.cases import ODD_VOCABULARY, absolute_terms, distances, gradients, run_config

PLAIN = {"parallel__distributed_optimizer": False}
PADDED = {"schedule__packing": False}
SP = {**PLAIN, "parallel__tensor": 2, "parallel__sequence_parallel": True}
CP = {**PLAIN, "parallel__context": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, {**PLAIN, "parallel__tensor": 2}),
    "PP2": (2, {**PLAIN, "parallel__pipeline": 2}),
    "CP2": (2, CP),
    "DP4": (4, PLAIN),
    "DP2 CP2, padded": (4, {**CP, **PADDED}),
    "TP2 SP CP2": (4, {**SP, "parallel__context": 2}),
}
"""Name -> (ranks, options)."""
PPO = {"loss": {"kind": "ppo_clip"}, "old_policy": "trainer"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "cispo, prompt mean": {},
    "cispo, sample mean": {"aggregation": "sample"},
    "cispo, token mean": {"aggregation": "token"},
    "cispo, constant length": {"aggregation": "constant", "constant_length_tokens": 20},
    "dispo": {"loss": {"kind": "dispo", "positive_max_ratio": 1.1, "negative_max_ratio": 1.2}},
    "dppo": {"loss": {"kind": "dppo", "max_divergence": 0.005}},
    "gspo": {"loss": {"kind": "gspo", "min_ratio": 0.9, "max_ratio": 1.1}},
    "mini_rl": {"loss": {"kind": "mini_rl", "max_weight_ratio": 1.1}},
    "ppo_clip": {"loss": {"kind": "ppo_clip", "dual_clip_ratio": 1.3}},
    "ppo_clip, token mask": {**PPO, "correction": {"kind": "token_mask", "max_ratio": 1.2}},
    "ppo_clip, sequence mask": {
        **PPO, "correction": {"kind": "sequence_mask", "max_drift_nats": 0.01},
    },
    "reinforce, truncation": {
        "loss": {"kind": "reinforce"},
        "correction": {"kind": "token_truncation", "max_ratio": 1.1},
    },
    "cispo, KL": {"kl_coefficient": 0.1},
    "cispo, entropy": {"entropy_coefficient": 0.1},
}  # fmt: skip
FEW = "cispo, prompt mean"
"""Also with three sequences in the whole batch: of four data-parallel ranks, one has none."""
ALONE, SOME, ALL = 1, 90, 10**6
"""Tokens of a micro-batch: one sequence each, some, all of them."""
SPLITS: dict[str, tuple[int, dict[str, Any], list[int] | None]] = {
    "some": (SOME, {}, None),
    "all": (ALL, {}, None),
    "another order": (SOME, {}, [3, 1, 4, 0, 2]),
    "some, padded": (SOME, PADDED, None),
    "all, padded": (ALL, PADDED, None),
}
"""Name -> (tokens of a micro-batch, options, order of the groups)."""


def groups(order: list[int] | None = None) -> tuple[list[Group], dict[int, list[int]]]:
    """Five groups of four completions; group 4 is dropped, completions differ in every way.

    Right and wrong completions are of other tokens, so that there is something to learn: the
    gradients of random ones would cancel each other.

    Args:
        order: of the groups in the batch.
    """
    rng = np.random.default_rng(3)
    prompts = {i: rng.integers(0, ODD_VOCABULARY, rng.integers(2, 7)).tolist() for i in range(5)}
    made = []
    for number in range(5):
        group = Group(number, number, 4, "generator-0")
        for i in range(4):
            n = int(rng.integers(2, 14))
            right = number != 4 and (number + i) % 3 == 0
            own = (0, 4) if right else (4, ODD_VOCABULARY)
            group.samples[i] = m.Sample(
                group=number,
                index=i,
                prompt_id=number,
                evaluation=-1,
                token_ids=m.int_bytes(rng.integers(*own, n)),
                logprobs=m.float_bytes(rng.normal(-3.43, 0.2, n)),
                segments=segments(n, (1, 2) if i == 1 else (0, 0)),
                spans=[m.VersionSpan(0, 0, n)],
                finish_reason="length" if (number, i) == (1, 3) else "stop",
            )
            verdict = Outcome.CORRECT if right else Outcome.WRONG
            group.verdicts[i] = Verdict(verdict, "")
        made.append(group)
    return [made[i] for i in order or range(5)], prompts


def gradient(policy: Any, config: RunConfig, order: list[int] | None = None) -> dict[str, Tensor]:
    """Gradient of the whole batch under one algorithm, complete on rank 0; nothing is applied."""
    from megatron_rl.trainer.step import Trainer

    policy.run = config
    trainer = Trainer(config, policy)
    chosen, prompts = groups(order)
    batch = build_batch(0, chosen, prompts, config.algorithm).batch
    found: dict[str, Tensor] = {}

    def keep(rate: float) -> float:
        found.update(gradients(policy))
        return 0.0

    policy.apply = keep
    trainer.train_step(batch, 0)
    return found


def config_of(folder: Path, ranks: int, name: str, split: int, **options: Any) -> RunConfig:
    algorithm = {f"algorithm__{k}": v for k, v in ALGORITHMS[name].items()}
    return run_config(
        folder / "model",
        ranks,
        output_dir=folder / "out",
        schedule__micro_batch_tokens=split,
        **algorithm,
        **options,
    )


def policy_of(config: RunConfig, folder: Path) -> Any:
    """Build a policy that differs from its reference, with all gradients on all ranks."""
    from megatron_rl.trainer.model import Policy

    policy = Policy(config, folder / "model")
    policy.load_huggingface(folder / "moved")
    run = policy._forward_backward
    policy._forward_backward = lambda **kw: run(**kw, force_all_reduce=not kw["forward_only"])
    return policy


def main(rank: int, folder: Path) -> None:
    from megatron_rl.trainer.world import destroy_world, init_world

    torch.set_num_threads(1)
    alone: dict[str, dict[str, Tensor]] = {}
    terms: dict[str, dict[str, Tensor]] = {}
    found: dict[str, Any] = {}
    if rank == 0:
        first = config_of(folder, 1, "cispo, prompt mean", ALONE)
        init_world(first, 0, 1, dist.HashStore())
        policy = policy_of(first, folder)
        for name in ALGORITHMS:
            config = config_of(folder, 1, name, ALONE)
            alone[name] = gradient(policy, config)
            with absolute_terms(policy) as terms[name]:
                gradient(policy, config)
        found["norms"] = {n: float(sum(g.square().sum() for g in alone[n].values())) for n in alone}
        for where, (split, options, order) in SPLITS.items():
            configs = {n: config_of(folder, 1, n, split, **options) for n in ALGORITHMS}
            found[where] = {
                n: distances(gradient(policy, configs[n], order), alone[n], terms[n])
                for n in ALGORITHMS
            }
        few = gradient(policy, config_of(folder, 1, FEW, SOME), order=[1])
        with absolute_terms(policy) as few_terms:
            gradient(policy, config_of(folder, 1, FEW, ALONE), order=[1])
        destroy_world()
    for i, (layout, (ranks, options)) in enumerate(LAYOUTS.items()):
        if rank >= ranks:
            continue
        first = config_of(folder, ranks, "cispo, prompt mean", SOME, **options)
        init_world(first, rank, ranks, dist.FileStore(str(folder / f"store{i}"), ranks))
        policy = policy_of(first, folder)
        seen = {
            n: gradient(policy, config_of(folder, ranks, n, SOME, **options)) for n in ALGORITHMS
        }
        seen_few = gradient(policy, config_of(folder, ranks, FEW, SOME, **options), order=[1])
        destroy_world()
        if rank == 0:
            found[layout] = {n: distances(seen[n], alone[n], terms[n]) for n in ALGORITHMS}
            found.setdefault("few", {})[layout] = distances(seen_few, few, few_terms)
    if rank == 0:
        torch.save(found, folder / "found.pt")
