"""The order of prompts: shuffled epochs without the solved prompts.

No-Positive-Resampling (ScaleRL): a prompt whose pass rate reached the threshold is not drawn in
later epochs. The order depends on seed, epoch and history only, so two runs with the same history
draw the same prompts.
"""

import random
from typing import Any, Literal


class Curriculum:
    """Endless stream of prompt ids.

    Args:
        prompts: size of the training pool; ids are 0 .. prompts - 1.
        seed: seed of the epochs' order.
        threshold: prompts with this pass rate or more are not drawn again; None draws all.
        statistic: pass rate of the `last` visit, or `mean` over all visits.
        at_least: smallest epoch; with fewer unsolved prompts it has all of them again.
    """

    def __init__(
        self,
        prompts: int,
        seed: int,
        *,
        threshold: float | None,
        statistic: Literal["last", "mean"],
        at_least: int,
    ) -> None:
        self._prompts, self._seed = prompts, seed
        self._threshold = float("inf") if threshold is None else threshold
        self._statistic, self._at_least = statistic, at_least
        self.epoch = 0  # passes over the pool, the current one included
        self._order: list[int] = []
        self._passed: dict[int, float] = {}
        self._visits: dict[int, int] = {}
        self.excluded = 0  # prompts left out of the current epoch

    def next(self) -> int:
        """Consume and return the next prompt id."""
        if not self._order:
            pool, rates = range(self._prompts), self._passed
            order = [p for p in pool if rates.get(p, 0.0) < self._threshold]
            if len(order) < self._at_least:
                order = list(pool)
            self.excluded = self._prompts - len(order)
            random.Random(f"epoch {self.epoch} {self._seed}").shuffle(order)
            self._order = order[::-1]
            self.epoch += 1
        return self._order.pop()

    def record(self, prompt: int, pass_rate: float) -> None:
        """Record the pass rate of a prompt's group when the group is trained."""
        n = self._visits.get(prompt, 0)
        self._passed[prompt] = (self._passed.get(prompt, 0.0) * n + pass_rate) / (n + 1)
        if self._statistic == "mean":  # n stays 0 for `last`
            self._visits[prompt] = n + 1

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        history = {"passed": self._passed, "visits": self._visits}
        return {"epoch": self.epoch, "order": self._order, "excluded": self.excluded, **history}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved `state()`."""
        self.epoch, self._order = state["epoch"], list(state["order"])
        self._passed, self._visits = dict(state["passed"]), dict(state["visits"])
        self.excluded = state["excluded"]
