"""Verdicts for the event loop: what is cheap at once, everything else by the verifier pool.

Which verifiers are cheap is decided in `rewards.tasks.INLINE`. Verdicts come back in any order; a
group waits for its own, and groups are trained in the order of their dispatch all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Self

from megatron_rl.data import Prompt
from megatron_rl.messages import Sample
from megatron_rl.rewards import Verdict
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.task_verifiers import INLINE, judge_of
from megatron_rl.rewards.verifier_settings import VerifierSettings


class Verification:
    """The verifiers of a run: `async with Verification(...) as v: v.start(prompt, sample)`.

    Args:
        settings: limits and sizes.
        kinds: verifiers that the prompts want.
        decode: text of a completion's token ids, special tokens included.

    Raises:
        VerifierDown: (on entering) a verifier cannot work here; the message has the remedy.
    """

    def __init__(
        self,
        settings: VerifierSettings,
        kinds: Iterable[str],
        decode: Callable[[list[int]], str],
    ) -> None:
        wanted = set(kinds)
        self._decode = decode
        self._inline = {kind: judge_of(kind, settings) for kind in wanted & INLINE}
        pooled = sorted(wanted - INLINE)
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
        """Whether the verifiers are behind: the generators get no more work until they are not."""
        return self.pool is not None and self.pool.full

    @property
    def waiting(self) -> int:
        """Completions without a verdict."""
        return len(self._running)

    def start(self, prompt: Prompt, sample: Sample) -> Verdict | asyncio.Task[Verdict]:
        """The verdict on a completion, or the task that will have it (or raise VerifierDown)."""
        text = self._decode(sample.token_ids)
        judge = self._inline.get(prompt.kind)
        if judge is not None:
            return judge(text, prompt.gold, prompt.meta)
        assert self.pool is not None, f"no verifier was started for {prompt.kind}"
        task = asyncio.create_task(self.pool.verify(prompt.kind, text, prompt.gold, prompt.meta))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Verdict]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            # When the verifiers are down all tasks fail with one error; the first ends the run.
            task.exception()
