"""Groups: the completions of one prompt, and their queue from dispatch to training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_rl.messages import Sample
from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.rewards.verifier_settings import RewardValues


@dataclass(slots=True)
class Group:
    """Completions of one prompt.

    Groups are numbered in dispatch order, and they are trained in it, whatever finished first:
    batches have no bias to short completions, and a resumed run trains the same prompts.
    """

    index: int
    prompt_id: int
    size: int
    task: str = ""
    """Name of the prompt's task."""
    values: RewardValues = field(default_factory=RewardValues)
    """Reward of each verdict."""
    samples: dict[int, Sample] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    @property
    def received(self) -> bool:
        """Whether every completion has arrived; verdicts may still be missing."""
        return len(self.samples) == self.size

    @property
    def complete(self) -> bool:
        """Whether every completion has arrived and was verified."""
        return len(self.verdicts) == self.size

    @property
    def unjudged(self) -> list[Sample]:
        """Completions that arrived and were not verified yet."""
        return [s for i, s in sorted(self.samples.items()) if i not in self.verdicts]

    @property
    def rewarded(self) -> list[Sample]:
        """Completions whose verdict is a reward."""
        return [s for s in self.ordered if self.reward(s) is not None]

    @property
    def usable(self) -> list[Sample]:
        """Completions with a reward that ended within the token budget."""
        return [s for s in self.rewarded if s.finish_reason != "length"]

    @property
    def ordered(self) -> list[Sample]:
        """All completions by index."""
        return [self.samples[i] for i in sorted(self.samples)]

    @property
    def pass_rate(self) -> float | None:
        """Share of right completions; None where the verifier came to no verdict on any.

        A comparison that went over its limit says nothing of the completion and is not counted; an
        answer that is missing or unreadable is not right.
        """
        judged = [v for v in self.verdicts.values() if v.verdict is not Outcome.TIMED_OUT]
        return sum(v.passed for v in judged) / len(judged) if judged else None

    def reward(self, sample: Sample) -> float | None:
        """Reward of a completion; None leaves it out of the batch and of the baseline."""
        return self.values.of(self.verdicts[sample.index])


class GroupQueue:
    """Groups in the order of their dispatch, which is the order in which steps take them.

    Args:
        per_step: groups that a step trains (B), those that a refill replaces not counted.
        replaced: whether a complete group is dropped and replaced by a later one (refill).

    Example: B = 2; groups 0 to 4 were dispatched, 1 is replaced: step 0 takes 0, 1 and 2, and group
    5 would be trained in step 2 at the latest (`next_step` = 0 + 4 // 2).
    """

    def __init__(self, per_step: int, replaced: Callable[[Group], bool]) -> None:
        self._per_step, self._is_replaced = per_step, replaced
        self._groups: dict[int, Group] = {}
        self._again: dict[int, Group] = {}
        self._replaced: set[int] = set()
        self._counted = 0
        self._taken: dict[int, int] = {}
        self.trained_steps = 0
        """Steps that were trained: the next one is v."""
        self.consumed = 0
        """Groups that trained steps took (c)."""
        self.next_index = 0
        """Number of the group that is dispatched next."""

    @property
    def next_step(self) -> int:
        """Step in which the next group is trained, at the latest: `v + (i - c) // B`."""
        return self.trained_steps + self._counted // self._per_step

    def __getitem__(self, index: int) -> Group:
        return self._groups[index]

    @property
    def waiting(self) -> list[Group]:
        """Groups that were dispatched and are not consumed."""
        return list(self._groups.values())

    def skip_finished(self) -> None:
        """Pass over groups that were finished before a resume."""
        while self.next_index in self._groups:
            self._counted += self.next_index not in self._replaced
            self.next_index += 1

    def dispatch(self, draw: Callable[[], int], make: Callable[[int, int], Group]) -> Group:
        """The next group, `make(index, prompt id)`; it is drawn, or an old one made again."""
        again = self._again.pop(self.next_index, None)
        prompt_id = draw() if again is None else again.prompt_id
        group = self._groups[self.next_index] = make(self.next_index, prompt_id)
        self.next_index += 1
        self._counted += 1
        return group

    def arrived(self, group: Group) -> None:
        """A completion of the group was verified."""
        if group.complete and self._is_replaced(group):
            self._replaced.add(group.index)
            # A group that a resumed run has not come to is not counted yet.
            self._counted -= group.index < self.next_index

    def next_groups(self, steps: int = 1) -> list[Group] | None:
        """The groups of the next steps, replaced ones included; None until all are complete."""
        found: list[Group] = []
        missing = steps * self._per_step
        while missing:
            group = self._groups.get(self.consumed + len(found))
            if group is None or not group.complete:
                return None
            found.append(group)
            missing -= group.index not in self._replaced
        return found

    def complete_ahead(self) -> int:
        """Complete groups from the next one on, without a gap."""
        count = 0
        while (g := self._groups.get(self.consumed + count)) is not None and g.complete:
            count += 1
        return count

    def take(self, step: int, groups: list[Group]) -> None:
        """These groups are trained in this step."""
        self._taken[step] = len(groups)

    def consume(self, step: int) -> list[Group]:
        """The groups of a step that was trained."""
        last = self.consumed + self._taken.pop(step)
        found = [self._groups.pop(i) for i in range(self.consumed, last)]
        self._counted -= sum(g.index not in self._replaced for g in found)
        self._replaced -= {g.index for g in found}
        self.consumed, self.trained_steps = last, step + 1
        return found

    def restore(self, step: int, consumed: int, groups: list[Group]) -> None:
        """Go on from a checkpoint: received groups are kept, the others are made again."""
        self.trained_steps, self.consumed = step, consumed
        self.next_index = consumed
        for group in groups:
            if not group.received:
                self._again[group.index] = group
                continue
            self._groups[group.index] = group
            self.arrived(group)
