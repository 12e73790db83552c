"""The supervised stage: token-mean cross-entropy on completions, through the RL path.

The loss is the sum of weighted token terms of `reinforce` with advantage 1 and the weight
`1 / completion tokens of the step`: the log-likelihood.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor

from megatron_rl.algorithm.losses.reinforce import Reinforce
from megatron_rl.algorithm.settings import Algorithm
from megatron_rl.config import RunConfig
from megatron_rl.data.prompt_format import save_tiny_tokenizer
from megatron_rl.data.prompts import demonstrations
from megatron_rl.models import start_checkpoint, tiny
from megatron_rl.trainer import world
from megatron_rl.trainer.batch import batch_of_examples, micro_batches_of
from megatron_rl.trainer.hf_checkpoint import save_huggingface
from megatron_rl.trainer.loss import Objective
from megatron_rl.trainer.model import Policy

Example = tuple[list[int], list[int]]
"""(prompt, completion) as token ids."""
CROSS_ENTROPY = Objective(Algorithm(loss=Reinforce()))
"""On `batch_of_examples`, whose advantages are 1, REINFORCE is the log-likelihood."""
FINAL_RATE = 0.1
"""The cosine ends at this fraction of the peak learning rate."""
REPORT_EVERY = 20
"""Steps between calls of `on_step`, which need a reduction over the ranks."""


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the rate: a linear warm-up times a cosine to a tenth of the peak."""
    s = config.sft
    warm = min(1.0, (step + 1) / max(1, s.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * step / s.steps))
    return s.learning_rate * warm * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def run_supervised(
    config: RunConfig,
    policy: Policy,
    examples_by_step: Iterator[list[Example]],
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Train on demonstrations until the iterator ends; collective over the trainer ranks.

    It yields the demonstrations of a whole step, the same on every rank. AdamW has betas
    (`optimizer.beta1`, `sft.beta2`) and eps 1e-8 here; the optimizer is left with the constants of
    `config.optimizer` and the moments of this stage. `on_step` is called on every rank with (steps
    done, mean loss of the last one), every `REPORT_EVERY` steps and after the last.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    o = config.optimizer
    policy.set_adam(o.beta1, config.sft.beta2, 1e-8)
    step, loss = 0, torch.zeros((), dtype=torch.float64)
    for step, examples in enumerate(examples_by_step, start=1):
        loss = _train(config, policy, examples, step - 1)
        if step % REPORT_EVERY == 0:
            _report(policy, step, loss, on_step)
    if step % REPORT_EVERY:
        _report(policy, step, loss, on_step)
    policy.set_adam(o.beta1, o.beta2, o.eps)


def _train(config: RunConfig, policy: Policy, examples: list[Example], step: int) -> Tensor:
    weight = 1.0 / sum(len(completion) for _, completion in examples)
    micro_batches = micro_batches_of(batch_of_examples(examples, weight), policy)
    policy.forward_backward(micro_batches, CROSS_ENTROPY, temperature=1.0)
    policy.apply(learning_rate(config, step))
    losses = [-weight * m.logprobs_T.sum() for m in micro_batches if m.logprobs_T is not None]
    return torch.stack(losses).sum().double() if losses else torch.zeros((), dtype=torch.float64)


def _report(
    policy: Policy, step: int, loss: Tensor, on_step: Callable[[int, float], None] | None
) -> None:
    total = loss.cpu() if policy.reports else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(total, group=world.control_group())
    if not math.isfinite(float(total)):
        raise FloatingPointError(
            f"supervised step {step}: the loss is {float(total)}; lower sft.learning_rate"
        )
    if on_step is not None:
        on_step(step, float(total))


def make_start_checkpoint(config: RunConfig, rank: int) -> None:
    """Train the tiny model on demonstrations and write the start checkpoint."""
    directory = start_checkpoint.start_directory(config)
    initial = directory.with_name(directory.name + "_initial")
    if rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
        tiny.create(config.model, initial, save_tiny_tokenizer, seed=config.seed)
    torch.distributed.barrier()
    tokenizer = Tokenizer.from_file(str(initial / "tokenizer.json"))
    policy = Policy(config, initial)
    printed = time.monotonic()

    def on_step(step: int, loss: float) -> None:
        nonlocal printed
        if rank == 0 and config.metrics.terminal != "off" and time.monotonic() - printed > 5:
            printed = time.monotonic()
            print(
                f"supervised stage: step {step + 1}/{config.sft.steps}, loss {loss:.3f}", flush=True
            )

    run_supervised(config, policy, examples_by_step(config, tokenizer), on_step)
    save_huggingface(policy, directory, source=initial)
    if rank == 0:
        start_checkpoint.mark_made(config, directory)
        shutil.rmtree(initial)
    torch.distributed.barrier()


def examples_by_step(config: RunConfig, tokenizer: Tokenizer) -> Iterator[list[Example]]:
    """Yield `sft.sequences_per_step` demonstrations per step, in shuffled epochs."""
    s = config.sft

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    pool = [(encode(prompt), encode(completion)) for prompt, completion in demonstrations(config)]
    random.Random(f"supervised order {config.seed}").shuffle(pool)
    stream = cycle(pool)
    for _ in range(s.steps):
        yield list(islice(stream, s.sequences_per_step))
