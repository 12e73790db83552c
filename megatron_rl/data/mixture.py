"""Several tasks in one run: the task of every prompt, and a curriculum of each task.

The task of the i-th prompt depends on the seed, the weights and i only (an error-diffusion draw:
after n prompts a task has had its share to within one prompt per task), so the composition of a
batch does not drift, and a resumed run draws the same prompts.
"""

import random
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from megatron_rl.algorithm.curriculum import Curriculum
from megatron_rl.data.question import DataError


class Mixture:
    """Draws prompts from several tasks by weight; each task keeps its own curriculum.

    Prompt ids are global: those of a task start at its offset, and at 0 in its curriculum. The
    arguments are by task, `sizes` in prompts and `weights` in any unit.

    Raises `DataError` without a task, or if the arguments have different tasks.
    """

    def __init__(
        self,
        curricula: Mapping[str, Curriculum],
        sizes: Mapping[str, int],
        weights: Mapping[str, float],
        seed: int,
    ) -> None:
        if not curricula or set(curricula) != set(sizes) or set(curricula) != set(weights):
            raise DataError(
                f"tasks with training prompts are {sorted(curricula)}, tasks with weights are"
                f" {sorted(weights)}: give each task prompts that no other task holds out"
            )
        self.curricula = dict(curricula)
        ends = [0, *accumulate(sizes[task] for task in curricula)]
        self._offsets = dict(zip(curricula, ends[:-1], strict=True))
        self._total = ends[-1]
        self._shares = shares({task: weights[task] for task in curricula})
        # Different phases, so that the tasks do not all begin at once.
        rng = random.Random(f"mixture {seed}")
        self._credit = {task: rng.random() * 1e-3 for task in curricula}

    @property
    def excluded(self) -> int:
        """Prompts excluded from the current epochs, over all tasks."""
        return sum(c.excluded for c in self.curricula.values())

    @property
    def epoch(self) -> int:
        """Number of passes over the whole prompt set that have begun: the minimum over tasks."""
        return min(c.epoch for c in self.curricula.values())

    def next(self) -> int:
        """Draw the next global prompt id."""
        for task, share in self._shares.items():
            self._credit[task] += share
        task = max(self._shares, key=self._credit.__getitem__)
        self._credit[task] -= 1.0
        return self._offsets[task] + self.curricula[task].next()

    def task_of(self, prompt: int) -> str:
        """Return the task of a global prompt id."""
        if not 0 <= prompt < self._total:
            raise IndexError(f"prompt {prompt} of {self._total}")
        return max((o, t) for t, o in self._offsets.items() if o <= prompt)[1]

    def record(self, prompt: int, pass_rate: float) -> None:
        """Record the pass rate of a prompt's group, when the group is trained."""
        task = self.task_of(prompt)
        self.curricula[task].record(prompt - self._offsets[task], pass_rate)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        streams = {task: c.state() for task, c in self.curricula.items()}
        return {"credit": self._credit.copy(), "shares": self._shares.copy(), "streams": streams}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state()`; `DataError` if it is of other tasks or weights."""
        if state["shares"] != self._shares:
            raise DataError(
                f"the checkpoint was made with the mixture {state['shares']}, now it is"
                f" {self._shares}: resume with the same, or start a new run"
            )
        self._credit = dict(state["credit"])
        for task, curriculum in self.curricula.items():
            curriculum.restore(state["streams"][task])


def shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Normalize weights to shares of 1."""
    total = sum(weights.values())
    return {task: weight / total for task, weight in weights.items()}
