"""vLLM's AsyncLLM as a rollout engine: sampling, scoring and in-flight weight updates.

What holds at any time:
- No request is cut by an update: it pauses decoding, and every request goes on with its KV cache.
- Every request is prefilled by the version that its `cache_salt` names, so it never reads prefix
  blocks of older weights: an update waits until each submitted request has its first token, and
  no request is submitted while one is under way.
- Every token knows the version that made it (vLLM's weight-version labels are our versions).
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.async_llm import AsyncLLM

from megatron_rl.config import RunConfig
from megatron_rl.generator.interruption import Completion
from megatron_rl.generator.request_experts import RequestRoutes
from megatron_rl.generator.sampling import piece_of, sampling, scoring
from megatron_rl.generator.vllm_args import (
    SCORES_AT_ONCE,
    engine_args,
    expected_tensors,
    interruption,
    read_architecture,
)
from megatron_rl.generator.weight_transfer import update_info
from megatron_rl.messages import Manifest
from megatron_rl.models.routed_experts import Routes, check_experts
from megatron_rl.weights.manifest import WeightsError, check_tensors
from megatron_rl.weights.rendezvous import NOWHERE, Rendezvous
from megatron_rl.weights.transports import ReceiverInfo, check_manifest

ENGINE_EXIT_SECONDS = 3.0
"""How long the engine's processes may tidy up; they hold nothing that is needed later."""
FIRST_TOKEN_SECONDS = 2.0
"""How long an update waits for the first token of requests that were just submitted."""
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.002, 0.1
"""First and longest pause between questions whether a version has arrived."""
_GRACE_SECONDS = 5.0
"""Workers end their own waits, and name what they waited for, before the engine does."""


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """What one update took."""

    pause_seconds: float
    transfer_seconds: float
    requests_in_flight: int


class Engine:
    """One vLLM engine, in processes of its own; make and use it in one running event loop."""

    def __init__(
        self,
        config: RunConfig,
        engine_index: int,
        model_dir: str,
        version: int = 0,
        rendezvous: Rendezvous = NOWHERE,
    ) -> None:
        """Start the engine's processes; blocks until they are ready.

        Args:
            config: the run's configuration.
            engine_index: number of this engine, from 0.
            model_dir: Hugging Face directory of the weights `version`.
            version: optimizer steps that made these weights.
            rendezvous: the run's store; the transport `disk` needs none.

        Raises:
            ValueError: the interruption phrase or the checkpoint does not fit; named.
            RuntimeError: vLLM did not start (its own error is above in the log).
        """
        self.version = version
        self.aborted = 0
        self._config = config
        self.architecture = read_architecture(model_dir)
        replay = config.algorithm.routing_replay
        check_experts(self.architecture, replay)
        self._expected = expected_tensors(config, self.architecture)
        self._receiver = ReceiverInfo.of(config, engine_index, rendezvous)
        interrupts = config.generation.interruption == "phrase"
        self.interruption = interruption(config, get_tokenizer(model_dir)) if interrupts else None
        args = engine_args(config, engine_index, model_dir)
        self._max_tokens = args.max_model_len
        others = multiprocessing.active_children()
        self._llm = AsyncLLM.from_engine_args(args)
        self.routes = None if replay == "none" else RequestRoutes(self._llm, self.architecture)
        self._processes = _engine_processes(others)
        self._ids = itertools.count()
        self._not_begun: set[str] = set()
        self._withdrawn: set[str] = set()
        self._all_begun = asyncio.Event()
        self._submitting = asyncio.Event()
        self._submitting.set()
        self._one_version = asyncio.Lock()
        self._scores = asyncio.Semaphore(SCORES_AT_ONCE)
        self.in_flight = 0

    async def prepare(self) -> None:
        """Label the start version and open the weight transfer; once, before anything else."""
        init = {"receiver": self._receiver}
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init))
        await self._llm.update_weight_version(str(self.version))
        if self.routes is not None:
            await self.routes.prepare()

    async def complete(
        self, prompt: list[int], thinking_budget: int, answer_budget: int, temperature: float
    ) -> Completion:
        """Sample one completion under the interruption rule.

        Raises:
            ValueError: prompt and budgets exceed the engine's longest sequence.
        """
        forced = 0 if self.interruption is None else len(self.interruption.phrase)
        longest = len(prompt) + thinking_budget + forced + answer_budget
        if longest > self._max_tokens:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with thinking budget {thinking_budget},"
                f" {forced} forced tokens and answer budget {answer_budget} needs"
                f" {longest} tokens; the engine takes {self._max_tokens}: raise"
                " generation.max_prompt_tokens or shorten the prompt"
            )
        completion = Completion(thinking_budget, answer_budget, self.interruption)
        while wanted := completion.wanted:
            inputs = prompt + completion.token_ids
            outputs, routes = await self._request(inputs, sampling(wanted, temperature))
            completion.add(piece_of(outputs, routes))
        return completion

    async def score(
        self, prompts: Sequence[list[int]], completions: Sequence[list[int]]
    ) -> tuple[int, list[list[float]]]:
        """Log-probs of given completions, all under one version, which is returned too.

        Prompt log-probs are never read from the prefix cache. vLLM computes them from the plain
        logits, hence at temperature 1 only.

        Raises:
            ValueError: the run samples at another temperature.
        """
        if self._config.generation.temperature != 1.0:
            raise ValueError(
                f"generation.temperature is {self._config.generation.temperature}: scores are"
                " computed at temperature 1 only; don't ask for scores in this run"
            )
        async with self._one_version:
            pairs = zip(prompts, completions, strict=True)
            scores = await asyncio.gather(*(self._score_one(p, c) for p, c in pairs))
            return self.version, scores

    async def _score_one(self, prompt: list[int], completion: list[int]) -> list[float]:
        if not completion:
            return []
        async with self._scores:
            (output,), _ = await self._request(prompt + completion, scoring())
        # The first prompt token has no log-prob: entry i belongs to token i + 1.
        flat = output.prompt_logprobs
        start = len(prompt) - 1
        if list(flat.token_ids[start:]) != completion:
            raise RuntimeError(
                f"vLLM returned log-probs of {len(flat.token_ids) - start} tokens for a completion"
                f" of {len(completion)}; this version does not do what the generator relies on"
            )
        return [float(x) for x in flat.logprobs[start:]]

    async def update(self, manifest: Manifest) -> UpdateTimes:
        """Swap to a version while requests are decoding.

        Everything that can be wrong with the version is checked before the engine is touched; an
        error after that leaves the engine paused, for the caller to end.

        Raises:
            WeightsError: names, shapes, dtypes or bytes are not what they must be.
            TimeoutError: `timeouts.transfer_seconds` went by, twice (to receive, and to load).
        """
        limit = self._config.timeouts.transfer_seconds
        await asyncio.to_thread(self._check, manifest)
        await asyncio.wait_for(self._receive(manifest), limit + _GRACE_SECONDS)
        async with self._one_version:
            return await asyncio.wait_for(self._swap(manifest), limit)

    def _check(self, manifest: Manifest) -> None:
        check_tensors(manifest.tensors, self._expected, manifest.version)
        check_manifest(self._config, manifest)

    async def _receive(self, manifest: Manifest) -> None:
        """Have every worker receive and check the version while decoding goes on."""
        await self._llm.collective_rpc("begin_weights", kwargs=update_info(manifest))
        pause = _POLL_SECONDS
        while True:
            workers = await self._llm.collective_rpc("weights_ready")
            if all(ready or error for ready, error in workers):
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        for number, (_, error) in enumerate(workers):
            if error:
                raise WeightsError(f"refused by worker {number}: {error}")

    async def _swap(self, manifest: Manifest) -> UpdateTimes:
        self._submitting.clear()
        await self._wait_for_first_tokens()
        in_flight = self.in_flight
        start = time.perf_counter()
        # `pause_generation` is this call and 20 ms of sleep for tidier ordering.
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        await self._withdraw_not_begun()
        loading = time.perf_counter()
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info(manifest)))
        await self._llm.finish_weight_update(str(manifest.version))
        loaded = time.perf_counter()
        await self._llm.resume_generation()
        self.version = manifest.version
        self._submitting.set()
        return UpdateTimes(time.perf_counter() - start, loaded - loading, in_flight)

    async def _wait_for_first_tokens(self) -> None:
        self._all_begun.clear()
        if not self._not_begun:
            return
        try:
            await asyncio.wait_for(self._all_begun.wait(), FIRST_TOKEN_SECONDS)
        except TimeoutError:
            return  # No room for them in the KV cache: they are withdrawn.

    async def _withdraw_not_begun(self) -> None:
        # They have sampled nothing, so nothing is lost: `_request` submits them again.
        if self._not_begun:
            self._withdrawn |= self._not_begun
            await self._llm.abort(list(self._not_begun))

    async def _request(
        self, prompt: list[int], params: SamplingParams
    ) -> tuple[list[RequestOutput], Routes | None]:
        """(outputs, experts of its tokens) of a request that is finished."""
        while True:
            await self._submitting.wait()
            request_id = str(next(self._ids))
            self._not_begun.add(request_id)
            self.in_flight += 1
            outputs = []
            try:
                inputs = tokens_input(prompt, cache_salt=str(self.version))
                async for output in self._llm.generate(inputs, params, request_id):
                    self._begun(request_id)
                    outputs.append(output)
            finally:
                self.in_flight -= 1
                self._begun(request_id)
            routes = None if self.routes is None else await self.routes.of(request_id, outputs)
            if request_id in self._withdrawn:
                self._withdrawn.discard(request_id)
                continue
            reason = outputs[-1].outputs[0].finish_reason if outputs else None
            if reason not in ("stop", "length"):
                self.aborted += 1
                raise RuntimeError(
                    f"vLLM ended request {request_id} ({len(prompt)} prompt tokens) with"
                    f" {reason!r} instead of finishing it; its own log has the cause"
                )
            return outputs, routes

    def _begun(self, request_id: str) -> None:
        self._not_begun.discard(request_id)
        if not self._not_begun:
            self._all_begun.set()

    async def held_weights(self) -> dict[str, torch.Tensor]:
        """The weights that the engine holds now, by Hugging Face name (tests and checks)."""
        async with self._one_version:
            (path, *_) = await self._llm.collective_rpc("save_held_weights")
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        Path(path).unlink()
        return weights

    def stop(self) -> None:
        """End the engine's processes; returns when they are gone."""
        self._llm.shutdown(timeout=ENGINE_EXIT_SECONDS)
        _, alive = psutil.wait_procs(self._processes, timeout=5.0)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=5.0)
        del self._llm  # Its __del__ would run, and fail, while the interpreter is torn down.


def _engine_processes(others: Sequence[Any]) -> list[psutil.Process]:
    started = [c for c in multiprocessing.active_children() if c not in others]
    processes = [psutil.Process(child.pid) for child in started]
    return processes + [p for core in processes for p in core.children(recursive=True)]
