"""Groups: the completions of one prompt, and their queue from dispatch to training."""

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_rl.messages import Sample
from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.rewards.verifier_settings import RewardValues


@dataclass(slots=True)
class Group:
    """The completions of one prompt."""

    index: int
    prompt_id: int
    size: int
    task: str = ""
    values: RewardValues = field(default_factory=RewardValues)
    """Reward of each verdict."""
    samples: dict[int, Sample] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    @property
    def received(self) -> bool:
        """True once every completion has arrived, verified or not."""
        return len(self.samples) == self.size

    @property
    def complete(self) -> bool:
        """True once every completion is verified."""
        return len(self.verdicts) == self.size

    @property
    def rewarded(self) -> list[Sample]:
        """Completions with a reward."""
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
        """Share of correct completions, or None without any.

        A verifier time-out tells nothing about the completion and is not counted; a missing or
        unreadable answer counts as incorrect.
        """
        decided = [v for v in self.verdicts.values() if v.outcome is not Outcome.TIMED_OUT]
        return sum(v.passed for v in decided) / len(decided) if decided else None

    def reward(self, sample: Sample) -> float | None:
        """Return a completion's reward; None leaves it out of batch and baseline."""
        return self.values.of(self.verdicts[sample.index])


class GroupQueue:
    """Groups in dispatch order, which is the order in which steps take them.

    So batches have no bias to short completions, and a resumed run trains the same prompts. A step
    trains `per_step` groups (B), not counting the complete ones that are `replaced`, dropped in
    favor of later ones (refill).

    Example: B = 2; groups 0 to 4 were dispatched and 1 is replaced: step 0 takes 0, 1 and 2, and
    group 5 would be trained in step 2 at the latest (`next_step` = 0 + 4 // 2).
    """

    def __init__(self, per_step: int, replaced: Callable[[Group], bool]) -> None:
        self._per_step, self._is_replaced = per_step, replaced
        self._groups: dict[int, Group] = {}
        self._again: dict[int, Group] = {}  # groups of a checkpoint to generate again
        self._replaced: set[int] = set()
        self._counted = 0  # dispatched groups that are neither consumed nor replaced
        self._taken: dict[int, int] = {}  # step -> groups of its batch
        self.trained_steps = 0
        """Trained steps: the next one is v."""
        self.consumed = 0
        """Groups of batches that were trained or skipped (c)."""
        self.next_index = 0

    @property
    def next_step(self) -> int:
        """The latest step in which the next group is trained: `v + (i - c) // B`."""
        return self.trained_steps + self._counted // self._per_step

    def __getitem__(self, index: int) -> Group:
        return self._groups[index]

    @property
    def waiting(self) -> list[Group]:
        """Dispatched groups that are not consumed."""
        return list(self._groups.values())

    def skip_finished(self) -> None:
        """Skip groups that were received before a resume."""
        while self.next_index in self._groups:
            self._counted += self.next_index not in self._replaced
            self.next_index += 1

    def dispatch(self, draw: Callable[[], int], make: Callable[[int, int], Group]) -> Group:
        """Return the next group, `make(index, prompt id)`, of a drawn or a restored prompt."""
        again = self._again.pop(self.next_index, None)
        prompt_id = draw() if again is None else again.prompt_id
        group = self._groups[self.next_index] = make(self.next_index, prompt_id)
        self.next_index += 1
        self._counted += 1
        return group

    def verified(self, group: Group) -> None:
        """Note a new verdict in the group."""
        if group.complete and self._is_replaced(group):
            self._replaced.add(group.index)
            # After a resume, groups from next_index on are not counted yet.
            self._counted -= group.index < self.next_index

    def next_groups(self, steps: int = 1) -> list[Group] | None:
        """Return the groups of the next steps with replaced ones; None until all are complete."""
        groups: list[Group] = []
        missing = steps * self._per_step
        while missing:
            group = self._groups.get(self.consumed + len(groups))
            if group is None or not group.complete:
                return None
            groups.append(group)
            missing -= group.index not in self._replaced
        return groups

    def complete_ahead(self) -> int:
        """Count the complete groups from the next one on, up to the first incomplete one."""
        count = 0
        while (g := self._groups.get(self.consumed + count)) is not None and g.complete:
            count += 1
        return count

    def take(self, step: int, groups: list[Group]) -> None:
        """Note the groups of a step's batch."""
        self._taken[step] = len(groups)

    def consume(self, step: int, *, trained: bool = True) -> list[Group]:
        """Remove and return the groups of a step's batch, which was trained or skipped."""
        last = self.consumed + self._taken.pop(step)
        groups = [self._groups.pop(i) for i in range(self.consumed, last)]
        self._counted -= sum(g.index not in self._replaced for g in groups)
        self._replaced -= {g.index for g in groups}
        self.consumed, self.trained_steps = last, self.trained_steps + trained
        return groups

    def restore(self, step: int, consumed: int, groups: list[Group]) -> None:
        """Restore a checkpoint: received groups are kept, the others are generated again."""
        self.trained_steps, self.consumed, self.next_index = step, consumed, consumed
        for group in groups:
            if group.received:
                self._groups[group.index] = group
                self.verified(group)
            else:
                self._again[group.index] = group
