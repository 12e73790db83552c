"""vLLM's AsyncLLM as a rollout engine: sampling, scoring and in-flight weight updates.

Invariants:
- An update aborts no request: it pauses decoding, and every request continues on its KV cache.
- Every request is prefilled by the version in its `cache_salt`, so it never reads prefix blocks of
  older weights: an update waits until each submitted request has its first token, and no request is
  submitted during one.
- Every token has the version that made it (vLLM's weight-version labels are our versions).
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
from vllm import SamplingParams
from vllm.distributed.weight_transfer import base as transfer
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.async_llm import AsyncLLM

from megatron_rl.config import RunConfig
from megatron_rl.generator import vllm_args
from megatron_rl.generator.cpu_attention import check_head_size
from megatron_rl.generator.expert_capture import RequestRoutes
from megatron_rl.generator.interruption import Completion
from megatron_rl.generator.vllm_sampling import sampled_tokens, sampling, scoring
from megatron_rl.messages import Manifest, WeightsUpdated
from megatron_rl.models import architecture
from megatron_rl.models.routed_experts import RoutedExperts, check_experts
from megatron_rl.models.safetensors_directory import read_config
from megatron_rl.weights.loading import NodeStores
from megatron_rl.weights.manifest import WeightsError, check_tensors
from megatron_rl.weights.number_format import WireFormat

ENGINE_EXIT_SECONDS = 3.0
"""Time for the engine's processes to exit by themselves; they hold nothing that is needed later."""
FIRST_TOKEN_SECONDS = 2.0
"""Longest wait of an update for the first tokens of requests that were just submitted."""
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.002, 0.1
"""First and longest pause between polls of the workers that map a version."""


class Engine:
    """One vLLM engine in its own processes; make and use it in one running event loop."""

    def __init__(
        self, config: RunConfig, engine_index: int, model_dir: str, version: int = 0
    ) -> None:
        """Start the engine's processes; blocks until they are ready.

        The arguments are those of `serve.run_generator`.

        Raises:
            ValueError: the interruption phrase or the checkpoint does not fit, or a package is
                missing.
            RuntimeError: vLLM did not start (its own error is above in the log).
        """
        self.version, self.aborted, self.in_flight = version, 0, 0
        self._config = config
        check_head_size(Path(model_dir))
        self.architecture = architecture(read_config(model_dir))
        replay = config.algorithm.routing_replay
        check_experts(self.architecture, replay)
        vllm_args.check_model_class(model_dir)
        self._expected = WireFormat.of(config).expected(self.architecture.shapes())
        self._stores = NodeStores()
        self.interruption = None
        if config.generation.interruption == "phrase":
            self.interruption = vllm_args.interruption(config, get_tokenizer(model_dir))
        args = vllm_args.engine_args(config, engine_index, model_dir)
        self._max_tokens = args.max_model_len
        others = multiprocessing.active_children()
        self._llm = AsyncLLM.from_engine_args(args)
        self.routes = None if replay == "none" else RequestRoutes(self._llm, self.architecture)
        self.cores = [c for c in multiprocessing.active_children() if c not in others]
        cores = [psutil.Process(c.pid) for c in self.cores]
        self._processes = cores + [p for core in cores for p in core.children(recursive=True)]
        self._ids = itertools.count()
        self._not_begun: set[str] = set()
        self._withdrawn: set[str] = set()
        self._all_begun = asyncio.Event()
        self._submitting = asyncio.Event()
        self._submitting.set()
        self._one_version = asyncio.Lock()
        self._scores = asyncio.Semaphore(vllm_args.CONCURRENT_SCORES)

    async def prepare(self) -> None:
        """Check the head, label the start version, open the weight transfer; before all else.

        Raises:
            RuntimeError: a worker computes other logits than the configuration says.
        """
        await self.check_head()
        await self._llm.init_weight_transfer_engine(transfer.WeightTransferInitRequest())
        await self._llm.update_weight_version(str(self.version))
        if self.routes is not None:
            await self.routes.prepare()

    async def check_head(self) -> None:
        """Raise RuntimeError unless every worker computes logits of the configured type."""
        expected = vllm_args.head_dtype(self._config)
        for number, dtypes in enumerate(await self._llm.collective_rpc("head_dtypes")):
            if dtypes != [expected]:
                raise RuntimeError(
                    f"precision.generator_logits is {self._config.precision.generator_head!r} (by"
                    " default as precision.logits), so the generator's logits are"
                    f" {expected}, and worker {number} computes them in"
                    f" {', '.join(dtypes) or 'a way that it does not tell'}: this vLLM release"
                    " does not apply `head_dtype` to the model's architecture"
                )

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
            completion.add(sampled_tokens(outputs, routes))
        return completion

    async def score(
        self, prompts: Sequence[list[int]], completions: Sequence[list[int]]
    ) -> tuple[int, list[list[float]]]:
        """Return (version, log-probs of given completions under that one version).

        Prompt log-probs are never read from the prefix cache. vLLM computes them from the plain
        logits, hence at temperature 1 only.

        Raises:
            ValueError: the run samples at another temperature.
        """
        if self._config.generation.temperature != 1.0:
            raise ValueError(
                f"generation.temperature is {self._config.generation.temperature}: scores are"
                " computed at temperature 1 only; request none in this run"
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
                f" of {len(completion)}: unsupported behavior of this release"
            )
        return [float(x) for x in flat.logprobs[start:]]

    async def update(self, manifest: Manifest, folder: str = "") -> WeightsUpdated:
        """Swap to a version in the stores of this node while requests are decoding.

        Everything that can be wrong with the version is checked before the engine is touched, and
        its bytes stay locked from there until they are loaded; an error after that leaves the
        engine paused, for the caller to end.
        The store `folder` has all of its buckets; empty: the stores of the trainer's ranks do.

        Raises:
            WeightsError: names, shapes, dtypes or bytes are not what they must be.
            TimeoutError: `timeouts.transfer_seconds` passed, in mapping or in loading.
        """
        limit = self._config.timeouts.transfer_seconds
        check_tensors(manifest.tensors, self._expected, manifest.version)
        with contextlib.ExitStack() as locks:
            checked = self._stores.checked(manifest, folder, limit)
            await asyncio.to_thread(locks.enter_context, checked)
            await asyncio.wait_for(self._map(manifest, folder), limit)
            async with self._one_version:
                return await asyncio.wait_for(self._swap(manifest.version), limit)

    async def _map(self, manifest: Manifest, folder: str) -> None:
        text = msgspec.json.encode(manifest).decode()
        await self._llm.collective_rpc("map_version", args=(text, folder))
        pause = _POLL_SECONDS
        while True:
            workers = await self._llm.collective_rpc("version_mapped")
            if all(ready or error for ready, error in workers):
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        for number, (_, error) in enumerate(workers):
            if error:
                raise WeightsError(f"refused by worker {number}: {error}")

    async def _swap(self, version: int) -> WeightsUpdated:
        """Load the version that all workers have mapped; nothing but this happens in the pause."""
        self._submitting.clear()
        self._all_begun.clear()
        if self._not_begun:
            # Those that get none, because the KV cache is full, are withdrawn below.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_begun.wait(), FIRST_TOKEN_SECONDS)
        in_flight = self.in_flight
        # `pause_generation` is this call and 20 ms of sleep for tidier ordering. It returns when
        # the step in progress has its tokens.
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        start = time.perf_counter()
        if self._not_begun:
            # They have sampled nothing, so nothing is lost: `_request` submits them again.
            self._withdrawn |= self._not_begun
            await self._llm.abort(list(self._not_begun))
        loading = time.perf_counter()
        await self._llm.start_weight_update()
        await self._llm.update_weights(transfer.WeightTransferUpdateRequest({"version": version}))
        await self._llm.finish_weight_update(str(version))
        loaded = time.perf_counter()
        await self._llm.resume_generation()
        self.version = version
        self._submitting.set()
        return WeightsUpdated(
            version=version,
            pause_seconds=time.perf_counter() - start,
            transfer_seconds=loaded - loading,
            requests_in_flight=in_flight,
        )

    async def _request(
        self, prompt: list[int], params: SamplingParams
    ) -> tuple[list[RequestOutput], RoutedExperts | None]:
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

    def stop(self) -> None:
        """End the engine's processes; returns when they are gone."""
        self._llm.shutdown(timeout=ENGINE_EXIT_SECONDS)
        _, alive = psutil.wait_procs(self._processes, timeout=5.0)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=5.0)
        del self._llm  # Its __del__ would run, and fail, while the interpreter exits.
