"""vLLM's AsyncLLM as a rollout engine: sampling, scoring and in-flight weight updates.

Invariants:
- An update aborts no request: it pauses decoding, and every request continues on its KV cache.
- Every request is prefilled by the weights in its `cache_salt`, so it never reads prefix blocks of
  others: an update waits until each submitted request has its first token, and no request is
  submitted during one.
- Every token has the version that made it (vLLM's weight-version labels are our versions). Versions
  are labels only: after a restart of the trainer, a number can come again with other weights.
- A call that is cancelled leaves the engine as if it had not been made, or had come to its end.
"""

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import psutil
from vllm.distributed.weight_transfer import base as transfer
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.async_llm import AsyncLLM

from megatron_rl.config import RunConfig
from megatron_rl.generator import engine_folder, engine_health, vllm_args
from megatron_rl.generator.cpu_attention import check_head_size
from megatron_rl.generator.engine_requests import EngineRequests
from megatron_rl.generator.expert_capture import RequestRoutes
from megatron_rl.generator.vllm_sampling import ONLY_AT_THE_END, request_seed, sampling, scoring
from megatron_rl.messages import Manifest, Partial, WeightsUpdated
from megatron_rl.models import architecture
from megatron_rl.models.routed_experts import check_experts
from megatron_rl.models.safetensors_directory import read_config
from megatron_rl.rollouts.interruption import Completion, SampledTokens
from megatron_rl.weights.loading import NodeStores
from megatron_rl.weights.manifest import WeightsError, check_tensors, checksum
from megatron_rl.weights.number_format import WireFormat

ENGINE_EXIT_SECONDS = 3.0  # for processes that hold nothing which is needed later
FIRST_TOKEN_SECONDS = 2.0  # wait of an update for first tokens of requests just submitted
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.002, 0.1  # between polls of workers that map a version
_CORE_LOOK_SECONDS = 0.5  # between looks at the processes, in a wait that only they can end


class Engine:
    """One vLLM engine in its own processes; make and use it in one running event loop."""

    def __init__(
        self, config: RunConfig, engine_index: int, model_dir: str, version: int = 0
    ) -> None:
        """Start the engine's processes; blocks until they are ready.

        Raises:
            ValueError: the interruption phrase or the checkpoint does not fit, or a package is
                missing.
            RuntimeError: vLLM did not start (its own error is above in the log).
        """
        self.version = version
        self._config = config
        check_head_size(Path(model_dir))
        self.architecture = architecture(read_config(model_dir))
        replay = config.algorithm.routing_replay
        check_experts(self.architecture, replay)
        vllm_args.check_model_class(model_dir)
        self._expected = WireFormat.of(config).expected(self.architecture.shapes())
        self._stores = NodeStores()
        self.interruption = None
        self.tokenizer = get_tokenizer(model_dir)
        if config.generation.interruption == "phrase":
            self.interruption = vllm_args.interruption(config, self.tokenizer)
        args = vllm_args.engine_args(config, engine_index, model_dir)
        self.max_tokens = args.max_model_len
        others = multiprocessing.active_children()
        self._llm = AsyncLLM.from_engine_args(args)
        self.routes = None if replay == "none" else RequestRoutes(self._llm, self.architecture)
        self.cores = [c for c in multiprocessing.active_children() if c not in others]
        cores = [psutil.Process(c.pid) for c in self.cores]
        self._processes = cores + [p for core in cores for p in core.children(recursive=True)]
        self._requests = EngineRequests(self._llm, self._drop_routes)
        self._one_version, self._updating = asyncio.Lock(), asyncio.Lock()
        self._content, self._swapping = "", False
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._scores = asyncio.Semaphore(vllm_args.CONCURRENT_SCORES)

    @property
    def in_flight(self) -> int:
        """Number of requests in vLLM."""
        return self._requests.in_flight

    @property
    def aborted(self) -> int:
        """Number of requests that vLLM ended unfinished; those of cancelled calls do not count."""
        return self._requests.aborted

    def _drop_routes(self, request_id: str) -> None:
        if self.routes is not None:
            self.routes.forget(request_id)

    async def prepare(self) -> None:
        """Check the head, label the start version, open the weight transfer; before all else.

        Raises:
            RuntimeError: a worker computes other logits than the configuration says.
        """
        await self.check_head()
        await self._llm.init_weight_transfer_engine(transfer.WeightTransferInitRequest())
        await self._llm.update_weight_version(str(self.version))
        await self._llm.get_supported_tasks()  # it is kept: requests are submitted without a wait
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
        self,
        prompt: list[int],
        thinking_budget: int,
        answer_budget: int,
        temperature: float,
        begun: Partial | None = None,
        grown: Callable[[int, Partial], None] | None = None,
        name: str = "",
    ) -> Completion:
        """Sample one turn under the interruption rule.

        Args:
            prompt: token ids of all that is before it.
            thinking_budget: tokens before the interruption.
            answer_budget: tokens after thinking.
            temperature: of sampling.
            begun: a beginning that another engine made; the budgets include it.
            grown: called about every `fleet.report_tokens` tokens of a completion that is not at
                its end, with the number of tokens before and `Completion.since` it; never where
                routed experts are captured.
            name: of the turn in the run, from which its noise follows; empty: any noise.

        Raises:
            ValueError: prompt and budgets exceed the engine's longest sequence, or `begun` cannot
                be continued.
        """
        self._check_length(prompt, thinking_budget, answer_budget)
        completion = Completion(thinking_budget, answer_budget, self.interruption)
        if begun is not None:
            if self.routes is not None:
                raise ValueError(
                    "a completion that another engine began was to be continued, but the experts of"
                    " its tokens are not known: with algorithm.routing_replay, completions are made"
                    " again from their prompts"
                )
            completion.begin(begun)
        every, reported = self._config.fleet.report_tokens, begun.num_tokens if begun else 0
        if grown is None or self.routes is not None:
            every = ONLY_AT_THE_END

        def take(sampled: SampledTokens) -> bool:
            nonlocal reported
            completion.add(sampled)
            length = len(completion.token_ids)
            if grown is not None and completion.wanted and length - reported >= every:
                grown(reported, completion.since(reported))
                reported = length
            return completion.wanted == 0

        while wanted := completion.wanted:
            inputs = prompt + completion.token_ids
            start = len(completion.token_ids)
            seed = request_seed(self._config.seed, name, start) if name else None
            params = sampling(wanted, temperature, every, seed)
            outputs = await self._requests.run(inputs, params, take)
            if self.routes is not None:
                completion.add_routes(await self.routes.of(outputs))
        return completion

    def _check_length(self, prompt: list[int], thinking_budget: int, answer_budget: int) -> None:
        forced = 0 if self.interruption is None else len(self.interruption.phrase)
        longest = len(prompt) + thinking_budget + forced + answer_budget
        if longest > self.max_tokens:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with thinking budget {thinking_budget},"
                f" {forced} forced tokens and answer budget {answer_budget} needs"
                f" {longest} tokens; the engine takes {self.max_tokens}: raise"
                " generation.max_prompt_tokens or shorten the prompt"
            )

    async def score(
        self, prompts: Sequence[list[int]], completions: Sequence[list[int]]
    ) -> tuple[int, list[list[float]]]:
        """Return (version, log-probs of given completions under that one version).

        Prompt log-probs are never read from the prefix cache. vLLM computes them from the plain
        logits, hence at temperature 1 only; ValueError: the run samples at another one.
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
            (output,) = await self._requests.run(prompt + completion, scoring())
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
        engine paused, for the caller to end. Updates are made one after the other, and one that is
        cancelled finishes a swap that it has begun.
        The store `folder` has all of its buckets; empty: the stores of the trainer's ranks do.

        Raises:
            WeightsError: names, shapes, dtypes or bytes are not what they must be.
            TimeoutError: `timeouts.transfer_seconds` passed, in mapping or in loading.
            RuntimeError: it was cancelled, and the swap failed.
        """
        limit = self._config.timeouts.transfer_seconds
        check_tensors(manifest.tensors, self._expected, manifest.version)
        async with self._updating:
            with contextlib.ExitStack() as locks:
                checked = self._stores.checked(manifest, folder, limit)
                await self._to_its_end(asyncio.to_thread(locks.enter_context, checked))
                await asyncio.wait_for(self._map(manifest, folder), limit)
                async with self._one_version:
                    try:
                        swap = asyncio.wait_for(self._swap(manifest), limit)
                        return await self._to_its_end(swap)
                    except asyncio.CancelledError:
                        if self._failed.done():
                            raise RuntimeError(self._failed.result()) from None
                        raise

    async def _to_its_end[T](self, work: Awaitable[T]) -> T:
        """Await what must not be left halfway: a cancellation counts when it is at its end."""
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            first, ends = asyncio.FIRST_COMPLETED, (task, self._failed)
            while not any(end.done() for end in ends):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait(ends, timeout=_CORE_LOOK_SECONDS, return_when=first)
                if any(core.exitcode for core in self.cores):  # vLLM tells no call of it
                    self._fail("a process of the engine is gone")
            if not task.done():
                task.cancel()
            elif not task.cancelled():
                task.exception()  # the cancellation is raised instead
            raise

    async def forget_stores(self) -> None:
        """Unmap the memory of all versions, so that it is free once their writer is gone."""
        async with self._updating:
            self._stores.forget()
            await self._llm.collective_rpc("forget_stores")

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

    async def _swap(self, manifest: Manifest) -> WeightsUpdated:
        """Load the version that all workers have mapped; nothing but this happens in the pause."""
        self._swapping = True
        try:
            updated = await self._load(manifest.version)
        except BaseException as e:
            self._fail(
                f"the swap to weights version {manifest.version} did not come to its end"
                f" ({type(e).__name__}: {e}): the engine is between two versions and must be ended"
            )
            raise
        content = checksum("".join(b.checksum for b in manifest.buckets).encode())
        self._requests.release(other_weights=content != self._content)
        self.version, self._content, self._swapping = manifest.version, content, False
        return updated

    async def _load(self, version: int) -> WeightsUpdated:
        await self._requests.hold(FIRST_TOKEN_SECONDS)
        in_flight = self.in_flight
        # `pause_generation` is this call and 20 ms of sleep for tidier ordering. It returns when
        # the step in progress has its tokens.
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        start = time.perf_counter()
        await self._requests.withdraw()
        loading = time.perf_counter()
        await self._llm.start_weight_update()
        await self._llm.update_weights(transfer.WeightTransferUpdateRequest({"version": version}))
        await self._llm.finish_weight_update(str(version))
        loaded = time.perf_counter()
        await self._llm.resume_generation()
        return WeightsUpdated(
            version=version,
            pause_seconds=time.perf_counter() - start,
            transfer_seconds=loaded - loading,
            requests_in_flight=in_flight,
        )

    async def check_alive(self, seconds: float) -> None:
        """Check that the engine's core answers a cheap call; RuntimeError: it must be ended.

        It did not answer and no work explains it, a process of it is gone, or a swap failed.
        """
        if self._failed.done():
            raise RuntimeError(self._failed.result())
        call = self._llm.engine_core.get_weight_version_async()
        try:
            await engine_health.check_answer(
                call, self.cores, self._processes, seconds, lambda: self._swapping
            )
        except RuntimeError as e:
            self._fail(str(e))
            raise

    def _fail(self, error: str) -> None:
        """Say that the engine must be ended; nothing waits for it any more."""
        if not self._failed.done():
            self._failed.set_result(error)

    def stop(self) -> None:
        """End the engine's processes; returns when they are gone."""
        self._llm.shutdown(timeout=ENGINE_EXIT_SECONDS)
        _, alive = psutil.wait_procs(self._processes, timeout=5.0)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=5.0)
        engine_folder.remove_groups()
        del self._llm  # Its __del__ would run, and fail, while the interpreter exits.
