"""Completions of evaluation sets and their verdicts, by the run's generator and verifiers.

The engine is the generator's, with its sampling and interruption settings; thinking has the longest
budget of the run's range, as in the run's own evaluations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from megatron_rl.commands.evaluate.questions import EvaluationSet
from megatron_rl.commands.evaluate.votes import vote
from megatron_rl.compat import upstream, vllm_fixes
from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.data import Prompt
from megatron_rl.generator.process_environment import prepare_environment
from megatron_rl.messages import Sample
from megatron_rl.orchestrator.verification import Verification
from megatron_rl.rewards import Outcome


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion and what the verifier said of it."""

    data: str
    """Name of the set."""
    prompt: int
    """Index of the prompt in its set."""
    sample: int
    """0 .. n-1."""
    text: str
    """Completion, special tokens included."""
    tokens: int
    truncated: bool
    interrupted: bool
    """Whether thinking was ended by the interruption phrase."""
    outcome: Outcome
    reason: str
    vote: str | None
    """The answer in a form in which equal answers are equal; None without one."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample."""

    samples: int
    """Completions of each prompt."""
    temperature: float
    seed: int
    """Seed of the engine; the order in which requests meet in it is not fixed by it."""


def run(
    config: RunConfig,
    model: Path,
    tokenizer: Tokenizer,
    sets: list[EvaluationSet],
    sampling: Sampling,
    done: Callable[[int], None],
) -> list[Answer]:
    """All completions with their verdicts, by set, prompt and sample.

    Args:
        config: generation, verifier and time-outs count.
        model: Hugging Face directory.
        tokenizer: the model's.
        sets: what is asked.
        sampling: how.
        done: is called with 1 after each verdict.

    Raises:
        ConfigError: `timeouts.evaluation_seconds` went by.
        VerifierError: the verifiers cannot work; with the remedy.
        ValueError, RuntimeError: the engine; named.
    """
    upstream.check(vllm_fixes.FIXES)
    longest = max(len(p.token_ids) for s in sets for p in s.prompts)
    generation = config.generation
    if longest > generation.max_prompt_tokens:
        generation = generation.model_copy(update={"max_prompt_tokens": longest})
    config = config.model_copy(update={"seed": sampling.seed, "generation": generation})
    prepare_environment(config, str(model))
    limit = config.timeouts.evaluation_seconds

    async def bounded() -> list[Answer]:
        try:
            async with asyncio.timeout(limit):
                return await _answers(config, model, tokenizer, sets, sampling, done)
        except TimeoutError:
            raise ConfigError(
                f"the evaluation did not end within timeouts.evaluation_seconds = {limit:g}: raise"
                " it, or take fewer samples"
            ) from None

    return asyncio.run(bounded())


async def _answers(
    config: RunConfig,
    model: Path,
    tokenizer: Tokenizer,
    sets: list[EvaluationSet],
    sampling: Sampling,
    done: Callable[[int], None],
) -> list[Answer]:
    from megatron_rl.generator.engine import Engine

    kinds = sorted({p.kind for s in sets for p in s.prompts})
    generation = config.generation

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    slots = asyncio.Semaphore(generation.concurrent_completions)

    async def one(data: str, index: int, prompt: Prompt, number: int) -> Answer:
        async with slots:
            completion = await engine.complete(
                prompt.token_ids,
                generation.thinking_budget_tokens[1],
                generation.answer_budget_tokens,
                sampling.temperature,
            )
        sample = Sample(
            group=prompt.id,
            index=number,
            prompt_id=prompt.id,
            evaluation=engine.version,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            forced=completion.forced,
            spans=completion.spans,
            started_version=engine.version,
            finish_reason=completion.finish_reason,
        )
        verdict = verification.start(prompt, sample)
        if isinstance(verdict, asyncio.Task):
            verdict = await verdict
        text = decode(completion.token_ids)
        done(1)
        return Answer(
            data=data,
            prompt=index,
            sample=number,
            text=text,
            tokens=len(completion.token_ids),
            truncated=completion.finish_reason == "length",
            interrupted=completion.forced != (0, 0),
            outcome=verdict.outcome,
            reason=verdict.reason,
            vote=vote(prompt.kind, text, verdict, config.verifier.think_end),
        )

    # The verifiers come first: what they lack is known in seconds, an engine takes minutes.
    async with Verification(config.verifier, kinds, decode) as verification:
        engine = Engine(config, 0, str(model))
        try:
            await engine.prepare()
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(one(s.name, i, prompt, number))
                    for s in sets
                    for i, prompt in enumerate(s.prompts)
                    for number in range(sampling.samples)
                ]
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            engine.stop()
        return [task.result() for task in running]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
