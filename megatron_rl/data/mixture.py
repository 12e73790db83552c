"""Several tasks in one run: which task a prompt comes from, and a pass rate and curriculum of each.

The task of the i-th prompt depends on the seed, the weights and i alone (an error-diffusion draw:
after n prompts a task has had its share to within one prompt per task), so a batch's composition
doesn't wander, and a resumed run draws the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.data.question import DataError


class Stream(Protocol):
    """An endless stream of a task's prompt ids; `algorithm.curriculum.Curriculum` is one."""

    excluded: int
    epoch: int

    def next(self) -> int:
        """The next prompt id."""

    def record(self, prompt: int, pass_rate: float) -> None:
        """Pass rate of a prompt's group."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""


@dataclass(slots=True)
class TaskStats:
    """Running counts of one task."""

    groups: int = 0
    passed: float = 0.0
    """Sum of the groups' pass rates."""

    @property
    def pass_rate(self) -> float | None:
        """Mean pass rate of the groups so far."""
        return self.passed / self.groups if self.groups else None


class Mixture:
    """Draws prompts from several tasks by weight; each task keeps its own curriculum.

    Prompt ids are global: those of a task start at its offset. It has the interface of a single
    task's curriculum (`next`, `record`, `state`, `restore`, `excluded`), and can stand in for one.

    Args:
        streams: task -> its curriculum, over ids from 0.
        sizes: task -> prompts it has.
        weights: task -> weight (any positive unit).
        seed: seed of the order.

    Raises:
        DataError: no task, a weight that is not positive, or tasks that differ between arguments.
    """

    def __init__(
        self,
        streams: Mapping[str, Stream],
        sizes: Mapping[str, int],
        weights: Mapping[str, float],
        seed: int,
    ) -> None:
        if not streams or set(streams) != set(sizes) or set(streams) != set(weights):
            raise DataError(f"a mixture of {sorted(streams)} with weights of {sorted(weights)}")
        bad = {t: w for t, w in weights.items() if not 0 < w < float("inf")}
        if bad:
            raise DataError(f"weights of a mixture must be positive, found {bad}")
        self.tasks = tuple(streams)
        self._streams = dict(streams)
        self._offsets = dict(zip(self.tasks, _offsets([sizes[t] for t in self.tasks]), strict=True))
        self._total = sum(sizes.values())
        self._shares = shares(weights, self.tasks)
        self._seed, self._drawn = seed, 0
        self._credit = self._first_credit()
        self.stats = {task: TaskStats() for task in self.tasks}

    @property
    def excluded(self) -> int:
        """Prompts left out of the current epochs, over all tasks."""
        return sum(s.excluded for s in self._streams.values())

    def excluded_of(self, task: str) -> int:
        """Prompts left out of a task's current epoch."""
        return self._streams[task].excluded

    @property
    def epoch(self) -> int:
        """Passes over the whole prompt set that were begun: the fewest of any task."""
        return min(s.epoch for s in self._streams.values())

    def epoch_of(self, task: str) -> int:
        """Passes over a task's prompts that were begun."""
        return self._streams[task].epoch

    def next(self) -> int:
        """The next global prompt id."""
        task = self._next_task()
        return self._offsets[task] + self._streams[task].next()

    def task_of(self, prompt: int) -> str:
        """The task of a global prompt id."""
        if not 0 <= prompt < self._total:
            raise IndexError(f"prompt {prompt} of {self._total}")
        return max((o, t) for t, o in self._offsets.items() if o <= prompt)[1]

    def record(self, prompt: int, pass_rate: float) -> None:
        """Pass rate of a prompt's group, when the group is trained."""
        task = self.task_of(prompt)
        self._streams[task].record(prompt - self._offsets[task], pass_rate)
        stats = self.stats[task]
        stats.groups, stats.passed = stats.groups + 1, stats.passed + pass_rate

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "drawn": self._drawn,
            "credit": dict(self._credit),
            "shares": dict(self._shares),
            "streams": {t: s.state() for t, s in self._streams.items()},
            "stats": {t: [s.groups, s.passed] for t, s in self.stats.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved `state()`.

        Raises:
            DataError: the checkpoint was made with other tasks or weights.
        """
        if state["shares"] != self._shares:
            raise DataError(
                f"the checkpoint was made with the mixture {state['shares']}, now it is"
                f" {self._shares}: resume with the same, or start a new run"
            )
        self._drawn, self._credit = state["drawn"], dict(state["credit"])
        for task, stream in self._streams.items():
            stream.restore(state["streams"][task])
            self.stats[task] = TaskStats(*state["stats"][task])

    def _first_credit(self) -> dict[str, float]:
        # A different phase for each task, so that not all begin at once.
        rng = random.Random(f"mixture {self._seed}")
        return {task: rng.random() * 1e-3 for task in self.tasks}

    def _next_task(self) -> str:
        for task in self.tasks:
            self._credit[task] += self._shares[task]
        task = max(self.tasks, key=lambda t: self._credit[t])
        self._credit[task] -= 1.0
        self._drawn += 1
        return task


def shares(weights: Mapping[str, float], tasks: Sequence[str]) -> dict[str, float]:
    """Weights as shares of 1."""
    total = sum(weights[t] for t in tasks)
    return {t: weights[t] / total for t in tasks}


def _offsets(sizes: Sequence[int]) -> list[int]:
    out, total = [], 0
    for size in sizes:
        out.append(total)
        total += size
    return out
