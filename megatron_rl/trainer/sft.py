"""The supervised stage: token-mean cross-entropy on responses, through the RL path.

The loss is the sum of weighted token terms of `reinforce` with advantage 1 and the weight `1 /
response tokens of the step`: the log-likelihood. A stage from a given model leaves in `output_dir`:

    final/        the Hugging Face directory, a run's `start_checkpoint`
    checkpoints/  as a run's, with `supervised.json`, the position in the data
    sft.jsonl     one line per step: step, loss, grad_norm, learning_rate, tokens, seconds ...
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatron_rl import messages
from megatron_rl.algorithm.losses.reinforce import Reinforce
from megatron_rl.algorithm.settings import Algorithm
from megatron_rl.config import ConfigError, RunConfig, save_config
from megatron_rl.data.examples import Example, Examples, Position
from megatron_rl.data.prompt_format import save_tiny_tokenizer
from megatron_rl.data.question import DataError
from megatron_rl.files import naming_full_disk, replace_file
from megatron_rl.models import start_checkpoint, tiny
from megatron_rl.trainer import checkpoint, checkpoint_folder, world
from megatron_rl.trainer.batch import batch_of_examples, micro_batches_of
from megatron_rl.trainer.hf_checkpoint import save_huggingface
from megatron_rl.trainer.loss import Objective
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.step import next_batch

CROSS_ENTROPY = Objective(Algorithm(loss=Reinforce()))
"""On `batch_of_examples`, whose advantages are 1, REINFORCE is the log-likelihood."""
STATE, LOG = "supervised.json", "sft.jsonl"
PRINT_SECONDS = 5.0
OnStep = Callable[[dict[str, Any]], None]


class ExampleFeed:
    """Batches of rank 0, each made in a thread while the one before is trained."""

    def __init__(
        self, config: RunConfig, steps: Iterator[tuple[list[Example], Position]], start: Position
    ) -> None:
        self._config, self._steps, self._thread = config, steps, ThreadPoolExecutor(1)
        self.position = self._after = start  # before the newest batch
        self._pending = self._thread.submit(next, steps)
        self._saved_at = time.monotonic()

    def next_batch(self, step: int) -> messages.Batch:
        """Return the batch of a step, which says when to save and when to stop."""
        self.position = self._after
        if step >= self._config.sft.steps:
            return messages.Batch(step=step, stop=True)
        examples, self._after = self._pending.result()
        self._pending = self._thread.submit(next, self._steps)
        weight = 1.0 / sum(len(completion) for _, completion in examples)
        now = time.monotonic()
        save = step > 0 and self._config.checkpoint.is_due(step, now - self._saved_at)
        self._saved_at = now if save else self._saved_at
        return msgspec.structs.replace(batch_of_examples(examples, weight), step=step, save=save)

    def save_state(self, step: int, directory: str) -> None:
        """Write the position into a checkpoint's folder."""
        replace_file(Path(directory) / STATE, json.dumps(asdict(self.position)) + "\n")


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the rate: a linear warm-up times a cosine to `sft.final_rate_fraction` of the peak."""
    s = config.sft
    warm = min(1.0, (step + 1) / max(1, s.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * step / s.steps))
    return s.learning_rate * warm * (s.final_rate_fraction + (1 - s.final_rate_fraction) * cosine)


def run_supervised(
    config: RunConfig,
    policy: Policy,
    feed: ExampleFeed | None,
    on_step: OnStep | None,
    stop_requested: Callable[[], bool] = lambda: False,
    start_step: int = 0,
    checkpoints: bool = False,
) -> bool:
    """Train until the feed stops or any rank is interrupted; collective over the trainer ranks.

    Rank 0 has the feed, others have None. AdamW has betas (`optimizer.beta1`, `sft.beta2`) and eps
    1e-8 here; the optimizer is left with the constants of `config.optimizer` and the moments of
    this stage. `on_step` is called with the row of each step in `sft.jsonl`. Returns False if the
    stage was interrupted. FloatingPointError: loss or gradient norm is not finite.

    Raises:
        DataError: the rows cannot be used.
        FloatingPointError: loss or gradient norm is not finite.
    """
    o, step = config.optimizer, start_step
    saver = checkpoint.Saver(config, policy) if checkpoints else None
    policy.set_adam(o.beta1, config.sft.beta2, 1e-8)
    while True:
        batch, interrupted = next_batch(
            feed, step, lambda: stop_requested() or (saver is not None and saver.failed()), policy
        )
        if saver is not None and (batch.save or batch.stop or interrupted):
            saver.save(step, None if feed is None else feed.save_state)
        if batch.stop or interrupted:
            break
        row = _train(config, policy, batch)
        if on_step is not None:
            on_step(row)
        step += 1
    if saver is not None:
        saver.wait()
    policy.set_adam(o.beta1, o.beta2, o.eps)
    return not interrupted


def _train(config: RunConfig, policy: Policy, batch: messages.Batch) -> dict[str, Any]:
    """Take one optimizer step; return its row, with the loss before the step."""
    started, rate = time.perf_counter(), learning_rate(config, batch.step)
    micro_batches = micro_batches_of(batch, policy)
    policy.forward_backward(micro_batches, CROSS_ENTROPY, temperature=1.0)
    norm = policy.apply(rate)
    loss = torch.zeros((), dtype=torch.float64)
    for micro in micro_batches:
        if policy.reports and micro.logprobs_T is not None:
            loss -= (micro.loss_weights_T * micro.logprobs_T).sum().cpu()
    dist.all_reduce(loss, group=world.control_group())
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise FloatingPointError(
            f"supervised step {batch.step}: loss {float(loss)} and gradient norm {norm}; lower"
            " sft.learning_rate"
        )
    tokens, prompts = int(messages.ints(batch.bounds)[-1]), messages.ints(batch.prompt_lengths)
    return {
        "step": batch.step,
        "loss": float(loss),
        "grad_norm": norm,
        "learning_rate": rate,
        "sequences": len(prompts),
        "tokens": tokens,
        "response_tokens": tokens - int(prompts.sum()),
        "seconds": time.perf_counter() - started,
    }


def run_stage(config: RunConfig, rank: int, stop_requested: Callable[[], bool]) -> bool:
    """Run the supervised stage of a configuration; collective over the trainer ranks.

    A run that begins with it makes its start directory, without checkpoints on the way; a tiny
    model without a given checkpoint has random weights before. Otherwise the result is
    `output_dir/final`, and `resume` continues. Returns False if the stage was interrupted.

    Raises:
        ConfigError: the rows cannot be used, or there is no checkpoint to resume from.
    """
    makes_start, at_random = config.made_start is not None, config.begins_at_random
    final = config.made_start or config.output_dir / "final"
    if at_random:
        initial = final.with_name(final.name + "_initial")
    else:
        initial = start_checkpoint.base_directory(config)
    if rank == 0 and makes_start:
        shutil.rmtree(final, ignore_errors=True)
    if rank == 0 and at_random:
        tools = any(task.tools for task in config.tasks.values())
        save_tokenizer = partial(save_tiny_tokenizer, tools=tools)
        tiny.create(config.model, initial, save_tokenizer, seed=config.seed)
    path = None if makes_start else checkpoint_folder.resume_from(config, rank)
    feed = _feed(config, initial, path) if rank == 0 else None
    dist.barrier(group=world.control_group())
    policy = Policy(config, initial)
    start_step = checkpoint.load(config, policy, path) if path else 0
    report = None if feed is None else _report(config, feed, start_step)
    finished = run_supervised(
        config, policy, feed, report, stop_requested, start_step, checkpoints=not makes_start
    )
    if finished:
        save_huggingface(policy, final, source=initial)
        if rank == 0 and makes_start:
            start_checkpoint.mark_made(config, final)
        if rank == 0 and at_random:
            shutil.rmtree(initial)
    dist.barrier(group=world.control_group())
    return finished


def _feed(config: RunConfig, initial: Path, path: Path | None) -> ExampleFeed:
    """Return rank 0's feed, from the position of the checkpoint `path` on."""
    save_config(config)
    start = Position()
    try:
        examples = Examples(config, initial)
        if path is not None:
            start = Position(**json.loads((path / STATE).read_text()))
        elif config.sft.source is not None:
            print(f"supervised stage: {examples.check()}", flush=True)
    except FileNotFoundError as e:
        raise ConfigError(f"{e.filename} does not exist: {path} is of another stage") from e
    except DataError as e:
        raise ConfigError(f"sft: {e}") from e
    return ExampleFeed(config, examples.steps(start), start)


def _report(config: RunConfig, feed: ExampleFeed, start_step: int) -> OnStep:
    """Return the function that writes the row of a step into `sft.jsonl` and to the terminal."""
    log, printed = config.output_dir / LOG, time.monotonic()
    rows = log.read_text().splitlines(keepends=True) if start_step and log.exists() else []
    # A resumed stage repeats the steps after its checkpoint.
    replace_file(log, "".join(row for row in rows if json.loads(row)["step"] < start_step))

    def report(row: dict[str, Any]) -> None:
        nonlocal printed
        row |= {"epoch": feed.position.epoch, "dropped": feed.position.dropped}
        with naming_full_disk(log), log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if config.metrics.terminal != "off" and time.monotonic() - printed > PRINT_SECONDS:
            printed, step = time.monotonic(), f"{row['step'] + 1}/{config.sft.steps}"
            print(f"supervised stage: step {step}, loss {row['loss']:.3f}", flush=True)

    return report
