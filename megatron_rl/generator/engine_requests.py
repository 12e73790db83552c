"""The requests of an engine: submitted, held back over a weight update, aborted when cancelled."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from megatron_rl.generator.vllm_sampling import RequestTokens
from megatron_rl.rollouts.interruption import SampledTokens


class EngineRequests:
    """The requests of an AsyncLLM; `dropped` is told each one that was submitted in vain."""

    def __init__(self, llm: AsyncLLM, dropped: Callable[[str], None]) -> None:
        self.in_flight = self.aborted = 0
        self._llm, self._dropped = llm, dropped
        self._ids = itertools.count()
        self._not_begun: set[str] = set()
        self._withdrawn: set[str] = set()
        self._all_begun = asyncio.Event()
        self._submitting = asyncio.Event()
        self._submitting.set()
        self._salt = 0

    async def hold(self, seconds: float) -> None:
        """Submit none from now on, and wait until all that were submitted have a first token."""
        self._submitting.clear()
        self._all_begun.clear()
        if self._not_begun:
            # Those that get none, because the KV cache is full, are withdrawn later.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_begun.wait(), seconds)

    async def withdraw(self) -> None:
        """Abort those without a first token, to submit them again: they have sampled nothing."""
        if self._not_begun:
            self._withdrawn |= self._not_begun
            await self._llm.abort(list(self._not_begun))

    def release(self, *, other_weights: bool) -> None:
        """Submit requests again.

        What they compute before and after an update is in the prefix cache under one salt, so the
        salt of an earlier load never comes again, even if its weights do.
        """
        self._salt += other_weights
        self._submitting.set()

    async def run(
        self,
        prompt: list[int],
        params: SamplingParams,
        take: Callable[[SampledTokens], bool] | None = None,
    ) -> list[RequestOutput]:
        """Return the outputs of a request; it ends early when `take` of its tokens is true."""
        while True:
            await self._submitting.wait()
            request_id = str(next(self._ids))
            self._not_begun.add(request_id)
            self.in_flight += 1
            try:
                outputs, done = await self._outputs(request_id, prompt, params, take)
            except asyncio.CancelledError:
                self._withdrawn.discard(request_id)
                # vLLM does this itself, but not while it still submits the request.
                await self._llm.abort(request_id)
                self._dropped(request_id)
                raise
            finally:
                self.in_flight -= 1
                self._begun(request_id)
            if request_id in self._withdrawn:
                self._withdrawn.discard(request_id)
                self._dropped(request_id)
                continue
            reason = outputs[-1].outputs[0].finish_reason if outputs else None
            if not done and reason not in ("stop", "length"):
                self.aborted += 1
                raise RuntimeError(
                    f"vLLM ended request {request_id} ({len(prompt)} prompt tokens) with"
                    f" {reason!r} instead of finishing it; its own log has the cause"
                )
            return outputs

    async def _outputs(
        self, request_id: str, prompt: list[int], params: SamplingParams, take: Any
    ) -> tuple[list[RequestOutput], bool]:
        """Return (outputs of a request, True if `take` ended it)."""
        outputs: list[RequestOutput] = []
        inputs = tokens_input(prompt, cache_salt=str(self._salt))
        tokens = RequestTokens(self._llm, request_id)
        async with contextlib.aclosing(self._llm.generate(inputs, params, request_id)) as stream:
            async for output in stream:
                self._begun(request_id)
                outputs.append(output)
                if take is None or not output.outputs[0].token_ids:
                    continue
                # A first token may have been on its way when the request was withdrawn.
                done = request_id not in self._withdrawn and take(tokens.of(output))
                if done and not output.finished:
                    return outputs, True
        return outputs, False

    def _begun(self, request_id: str) -> None:
        self._not_begun.discard(request_id)
        if not self._not_begun:
            self._all_begun.set()
