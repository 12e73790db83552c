"""Groups: the completions of one prompt, from dispatch to training."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.messages import Sample
from megatron_rl.rewards import Outcome, Verdict


@dataclass(slots=True)
class Group:
    """Completions of one prompt.

    Groups are numbered in dispatch order, and group i is trained in step `i // prompts_per_step`,
    whatever finished first: batches have no bias to short completions, and a resumed run trains
    the same prompts.
    """

    index: int
    prompt_id: int
    size: int
    engine: str
    samples: dict[int, Sample] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every completion has arrived and was verified."""
        return len(self.verdicts) == self.size

    @property
    def usable(self) -> list[Sample]:
        """Completions that ended; truncated ones are excluded from the batch."""
        return [s for s in self.ordered if s.finish_reason != "length"]

    @property
    def ordered(self) -> list[Sample]:
        """All completions by index."""
        return [self.samples[i] for i in sorted(self.samples)]

    @property
    def pass_rate(self) -> float:
        """Share of all completions that are right."""
        return sum(v.passed for v in self.verdicts.values()) / self.size

    def reward(self, sample: Sample) -> float:
        """+1 for a right completion, -1 for any other."""
        return 1.0 if self.verdicts[sample.index].verdict is Outcome.CORRECT else -1.0
