"""Completions with their experts, as the batch of a step of their version."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from megatron_rl.messages import Batch

PROMPTS = [
    # A common beginning of more than a block of 32 tokens, then their own; each one four times.
    [1, *(8 + (5 * j) % 20 for j in range(36)), *(8 + (7 * i + 3 * j) % 20 for j in range(4)), 4]
    for i in range(6)
    for _ in range(4)
]


async def batch_of(engine: Any, thinking: int = 60, answer: int = 10) -> tuple[Batch, list[Any]]:
    """(batch with every completion in it, the completions); the first prompt runs ahead."""
    first = await engine.complete(PROMPTS[0], thinking, answer, 1.0)
    rest = await asyncio.gather(*(engine.complete(p, thinking, answer, 1.0) for p in PROMPTS[1:]))
    completions, version = [first, *rest], engine.version
    ids, logprobs, weights, versions, routes, bounds = [], [], [], [], [], [0]
    for prompt, c in zip(PROMPTS, completions, strict=True):
        assert {s.version for s in c.spans} == {version}
        p, n = len(prompt), len(c.token_ids)
        sampled = np.ones(n)
        sampled[c.forced[0] : c.forced[1]] = 0
        ids += [*prompt, *c.token_ids]
        logprobs += [0.0] * p + c.logprobs
        weights += [0.0] * p + sampled.tolist()
        versions += [-1] * p + np.where(sampled > 0, version, -1).tolist()
        routes.append(engine.routes.encoded(c.routes_NLK, p + n))
        bounds.append(bounds[-1] + p + n)

    def flat(values: list[Any], kind: str) -> bytes:
        return np.asarray(values, dtype=kind).tobytes()

    batch = Batch(
        step=version,
        bounds=flat(bounds, "<i4"),
        prompt_lengths=flat([len(p) for p in PROMPTS], "<i4"),
        token_ids=flat(ids, "<i4"),
        advantages=flat(np.ones(len(ids)), "<f4"),
        generator_logprobs=flat(logprobs, "<f4"),
        loss_weights=flat(np.asarray(weights) / sum(weights), "<f4"),
        versions=flat(versions, "<i4"),
        routes=routes,
        probe=[],
    )
    return batch, completions
