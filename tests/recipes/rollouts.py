"""Groups of completions for the trainer-level tests: demonstrations of the tiny task as if sampled.

The edge is the generator: token ids are noisy demonstrations, and the log-probs are those that the
policy gives them when they are "sampled", with a little noise in place of another engine's kernels.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from megatron_rl import messages as m
from megatron_rl.config import ArithmeticTask
from megatron_rl.data import arithmetic
from megatron_rl.data.prompt_format import save_tiny_tokenizer
from megatron_rl.models.packing import RowLayout
from megatron_rl.orchestrator.groups import Group
from megatron_rl.rewards import Verdict, verify_exact
from megatron_rl.trainer.batch import batch_of_examples, divide
from tests.segments import segments

ENGINE_NOISE = 1e-4


class Rollouts:
    """Prompts with demonstrations, and groups made of them.

    Args:
        folder: the tokenizer is written here.
        prompts: different prompts.
        size: completions of a group.
    """

    def __init__(self, folder: Path, prompts: int = 24, size: int = 4) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_tiny_tokenizer(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._rng = random.Random(5)
        self.size = size
        texts: dict[str, list[str]] = {}
        pool = arithmetic.demonstrations(ArithmeticTask(heldout_prompts=4), 3, prompts, size, 60)
        for prompt, completion in pool:
            texts.setdefault(prompt, []).append(completion)
        chosen = [(p, c[:size]) for p, c in texts.items() if len(c) >= size]
        self.prompts = {i: self._encode(p) for i, (p, _) in enumerate(chosen)}
        self._completions = [[self._encode(c) for c in group] for _, group in chosen]
        self._answers = [_answer(p) for p, _ in chosen]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def groups(self, policy: Any, version: int, first: int, count: int) -> list[Group]:
        """Complete groups number `first` on, sampled by `version`.

        In each group one completion was interrupted, so that a token of it is forced; every third
        group has a truncated one.
        """
        found = []
        numbers = [index % len(self.prompts) for index in range(first, first + count)]
        logprobs = self._logprobs(policy, numbers)
        for index, prompt_id in zip(range(first, first + count), numbers, strict=True):
            group = Group(index, prompt_id, self.size, "generator-0")
            for i, ids in enumerate(self._completions[prompt_id]):
                sample = self._sample(index, i, prompt_id, ids, logprobs.pop(0), version)
                sample = m.decode(m.encode(sample))  # as it comes off the wire
                group.samples[i] = sample
                group.verdicts[i] = self._verdict(prompt_id, ids)
            found.append(group)
        return found

    def _verdict(self, prompt_id: int, ids: list[int]) -> Verdict:
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return verify_exact(text, self._answers[prompt_id])

    def _sample(
        self, group: int, index: int, prompt: int, ids: list[int], lps: list[float], version: int
    ) -> m.Sample:
        end = ids.index(self._encode("</think>")[0])
        forced = (end, end + 1) if index == 1 else (0, 0)
        noisy = [x + self._rng.gauss(0, ENGINE_NOISE) for x in lps]
        if index == 1:
            noisy[end] = 0.0
        return m.Sample(
            group=group,
            index=index,
            prompt_id=prompt,
            evaluation=-1,
            token_ids=m.int_bytes(ids),
            logprobs=m.float_bytes(noisy),
            segments=segments(len(ids), forced),
            spans=[m.VersionSpan(version, 0, len(ids))],
            finish_reason="length" if index == 2 and group % 3 == 0 else "stop",
        )

    def _logprobs(self, policy: Any, prompt_ids: list[int]) -> list[list[float]]:
        """Under the policy, of every completion of these prompts, in order."""
        examples = [(self.prompts[p], c) for p in prompt_ids for c in self._completions[p]]
        batch = batch_of_examples(examples)
        (micro,) = divide(batch, policy.architecture, RowLayout(max_tokens=10**6))
        with torch.no_grad():
            policy.forward_backward([micro], None)
        lengths = [len(p) + len(c) for p, c in examples]
        flat = torch.zeros(sum(lengths))
        flat[micro.source_T] = micro.logprobs_T.float()
        rows = flat.split(lengths)
        return [row[len(p) :].tolist() for row, (p, _) in zip(rows, examples, strict=True)]

    def advantage_of_right(self, policy: Any) -> float:
        """Mean log-prob per token of right completions minus that of wrong ones."""
        means: dict[bool, list[float]] = {True: [], False: []}
        logprobs = self._logprobs(policy, list(self.prompts))
        for prompt_id in self.prompts:
            for ids in self._completions[prompt_id]:
                row = logprobs.pop(0)
                means[self._verdict(prompt_id, ids).passed].append(sum(row) / len(row))
        right, wrong = (sum(x) / len(x) for x in (means[True], means[False]))
        return right - wrong


def _answer(prompt: str) -> str:
    expression = prompt.removeprefix("<bos>").partition("=")[0]
    return str(eval(expression))
