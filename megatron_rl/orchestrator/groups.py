"""Groups: the completions of one prompt, and their queue from dispatch to training."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_rl.messages import Grown, Partial, Sample
from megatron_rl.orchestrator import RunError
from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.rewards.verifier_settings import RewardValues


@dataclass(slots=True)
class Group:
    """The completions of one prompt."""

    index: int
    prompt_id: int
    size: int
    task: str = ""
    values: RewardValues = field(default_factory=RewardValues)  # reward of each verdict
    samples: dict[int, Sample] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    begun: dict[int, Partial] = field(default_factory=dict)  # completions that have not arrived
    losses: int = 0  # generators that were lost while they had it in work
    failures: Counter[int] = field(default_factory=Counter)  # of tools, environment or agent
    dropped: set[int] = field(default_factory=set)  # not made again after so many failures
    failed: bool = False  # dropped after too many losses; it has only what was verified then

    @property
    def missing(self) -> list[int]:
        """Indices of the completions that have not arrived."""
        return [i for i in range(self.size) if i not in self.samples and i not in self.dropped]

    @property
    def complete(self) -> bool:
        """True once every completion is verified or dropped; also of a failed group."""
        return self.failed or len(self.verdicts) + len(self.dropped) == self.size

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
        unreadable answer counts as incorrect. A failed group has none.
        """
        if self.failed:
            return None
        decided = [v for v in self.verdicts.values() if v.outcome is not Outcome.TIMED_OUT]
        return sum(v.passed for v in decided) / len(decided) if decided else None

    def grow(self, grown: Grown) -> None:
        """Add to the beginning of a completion; `RunError` if it does not go on where that ends."""
        before = self.begun.get(grown.index, Partial(b"", b"", [], (0, 0)))
        if grown.start != before.num_tokens:
            raise RunError(
                f"completion {grown.index} of group {grown.group} goes on at token {grown.start},"
                f" and {before.num_tokens} were told before"
            )
        rest = grown.rest
        ids, logprobs = before.token_ids + rest.token_ids, before.logprobs + rest.logprobs
        self.begun[grown.index] = Partial(ids, logprobs, rest.spans, rest.forced)

    def reward(self, sample: Sample) -> float | None:
        """Return a completion's reward; None leaves it out of batch and baseline."""
        return self.values.of(self.verdicts[sample.index])


class GroupQueue:
    """Groups in dispatch order, which is the order in which steps take them.

    So batches have no bias to short completions, and a resumed run trains the same prompts. A step
    trains `per_step` groups (B), not counting the complete ones that are `replaced`, dropped in
    favor of later ones (refill, or failed). What a lost generator had is dispatched again, before
    anything new, under the same index.

    Example: B = 2; groups 0 to 4 were dispatched and 1 is replaced: step 0 takes 0, 1 and 2, and
    group 5 would be trained in step 2 at the latest (`next_step` = 0 + 4 // 2).
    """

    def __init__(self, per_step: int, replaced: Callable[[Group], bool]) -> None:
        self._per_step, self._is_replaced = per_step, replaced
        self._groups: dict[int, Group] = {}
        self._returned: dict[int, set[int]] = {}  # group -> completions to dispatch again
        self._replaced: set[int] = set()
        self._taken: dict[int, int] = {}  # step -> groups of its batch
        self.trained_steps = 0  # trained steps: the next one is v
        self.consumed = 0  # groups of batches that were trained or skipped (c)
        self.next_index = 0

    def latest_step(self, index: int) -> int:
        """Return the latest step in which a group is trained: `v + (i - c) // B`.

        Replaced groups before it do not count.
        """
        replaced = sum(i < index for i in self._replaced)
        return self.trained_steps + (index - self.consumed - replaced) // self._per_step

    def __getitem__(self, index: int) -> Group:
        return self._groups[index]

    def get(self, index: int) -> Group | None:
        """Return a group; None if its step was trained, or it failed."""
        group = self._groups.get(index)
        return None if group is None or group.failed else group

    @property
    def waiting(self) -> list[Group]:
        """Dispatched groups that are not consumed, in their order."""
        return [self._groups[i] for i in sorted(self._groups)]

    @property
    def next_to_dispatch(self) -> int:
        """The index of the group to dispatch next: one that came back, else a new one."""
        return min(self._returned, default=self.next_index)

    def dispatch(
        self, draw: Callable[[], int], make: Callable[[int, int], Group]
    ) -> tuple[Group, list[int]]:
        """Return the next group, which may be a new one of `make`, and what to dispatch of it."""
        if (index := self.next_to_dispatch) < self.next_index:
            return self._groups[index], sorted(self._returned.pop(index))
        group = self._groups[index] = make(index, draw())
        self.next_index += 1
        return group, list(range(group.size))

    def lost(self, index: int, indices: set[int], attempts: int) -> Group | None:
        """Put completions of a lost generator back to the head of the queue.

        Returns the group if it was dropped instead, as its `attempts`-th loss. With attempts 0 the
        loss does not count: the generator gave them back.
        """
        if (group := self.get(index)) is None:
            return None
        group.losses += attempts > 0
        if attempts and group.losses >= attempts:
            group.failed = True
            group.samples = {i: s for i, s in group.samples.items() if i in group.verdicts}
            group.begun.clear()
            self._returned.pop(index, None)
            self._replaced.add(index)
            return group
        self._returned.setdefault(index, set()).update(indices)
        return None

    def rollout_failed(self, group: Group, index: int, attempts: int) -> bool:
        """Put a completion back to the head of the queue; True: dropped, as its last attempt."""
        group.failures[index] += 1
        group.begun.pop(index, None)
        if group.failures[index] < attempts:
            self._returned.setdefault(group.index, set()).add(index)
            return False
        group.dropped.add(index)
        group.failed = len(group.dropped) == group.size
        if group.complete:
            self.verified(group)
        return True

    def verified(self, group: Group) -> None:
        """Note a new verdict in the group."""
        if group.failed or (group.complete and self._is_replaced(group)):
            self._replaced.add(group.index)

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
        self._replaced -= {g.index for g in groups}
        self.consumed, self.trained_steps = last, self.trained_steps + trained
        return groups

    def restore(self, step: int, consumed: int, groups: list[Group]) -> None:
        """Restore a checkpoint: what has arrived is kept, the rest is generated again."""
        self.trained_steps, self.consumed = step, consumed
        self.next_index = consumed + len(groups)
        for group in groups:
            self._groups[group.index] = group
            if group.missing and not group.failed:
                self._returned[group.index] = set(group.missing)
            self.verified(group)
