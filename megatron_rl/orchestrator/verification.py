"""Verdicts for the event loop: cheap verifiers run inline, all others in the verifier pool.

`INLINE` in `rewards.task_verifiers` lists the cheap ones. Verdicts come back in any order.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Self

from megatron_rl.data import Prompt
from megatron_rl.messages import Sample, ints
from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.task_verifiers import INLINE, make_verifier
from megatron_rl.rewards.verifier_settings import VerifierSettings


class Verification:
    """The verifiers of a run; entering raises VerifierDown if one cannot work here.

    `decode` gives the text of token ids with special tokens.
    """

    def __init__(
        self, settings: VerifierSettings, kinds: Iterable[str], decode: Callable[[list[int]], str]
    ) -> None:
        kinds = set(kinds)
        self._decode = decode
        self._inline = {kind: make_verifier(kind, settings) for kind in kinds & INLINE}
        pooled = sorted(kinds - INLINE)
        self.pool = VerifierPool(settings, pooled) if pooled else None
        self._running: set[asyncio.Task[Verdict]] = set()

    async def __aenter__(self) -> Self:
        if self.pool is not None:
            await self.pool.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self.pool is not None:
            await self.pool.__aexit__(*raised)

    @property
    def full(self) -> bool:
        """True while the verifiers are behind: dispatch waits."""
        return self.pool is not None and self.pool.full

    @property
    def metrics(self) -> dict[str, int]:
        """Backlog and failures of the verifier pool, by the names of metrics.jsonl."""
        if self.pool is None:
            return {}
        deaths, bugs = self.pool.stats.deaths, self.pool.stats.bugs
        waiting = len(self._running)
        return {"verifier_waiting": waiting, "verifier_deaths": deaths, "verifier_bugs": bugs}

    def start(self, prompt: Prompt, sample: Sample) -> Verdict | asyncio.Task[Verdict]:
        """Return the verdict on a completion, or its task, which may raise VerifierDown.

        An environment's own verdict stands; else the task's verifier judges the last turn.
        """
        if sample.verdict is not None:
            outcome, reason, reward = sample.verdict
            return Verdict(Outcome(outcome), reason, reward)
        text = self._decode(ints(sample.last_turn).tolist())
        q = prompt.question
        if (verify := self._inline.get(q.kind)) is not None:
            return verify(text, q.gold, q.meta)
        assert self.pool is not None, f"no verifier was started for {q.kind}"
        task = asyncio.create_task(self.pool.verify(q.kind, text, q.gold, q.meta))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Verdict]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: all tasks fail with one error, and the first ends the run
