"""A rollout function: from a prompt to its completion, in one turn of the policy or in many.

    async def rollout(prompt: RolloutPrompt, policy: RolloutPolicy) -> Rollout

It runs in the generator's process, where its engine is. Token ids come from the engine and are
never encoded again: turn n + 1 begins with the exact ids of turn n. A function that cannot finish
raises `RolloutError`: the rollout is made again, then dropped and counted, and never gets a reward.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megatron_rl import messages as m
from megatron_rl.models.routed_experts import RoutedExperts
from megatron_rl.rewards import Verdict
from megatron_rl.rollouts.interruption import Completion, extend_spans


class RolloutError(RuntimeError):
    """A tool, an environment or an agent failed: no fault of the policy, and no reward.

    `cause` is one of a few words (`timed out`, `raised`, `died`, `flooded`, ...) by which failures
    are counted; the message has the rest.
    """

    def __init__(self, cause: str, message: str, *, innocent: bool = False) -> None:
        super().__init__(message)
        self.cause = cause
        self.innocent = innocent
        """True if another rollout took its process down: it is no attempt of its own."""


@dataclass(frozen=True, slots=True)
class RolloutPrompt:
    """The start of a rollout."""

    token_ids: list[int]
    """The question under the model's chat template, without tools; it opens the policy's turn."""
    limits: m.TurnLimits  # of each turn
    task: str = ""
    """Name of the task, which has the settings of the rollout (`tasks.<name>` of the run)."""
    row: dict[str, Any] = field(default_factory=dict)
    """`messages` (the turns of the question), `gold` and `meta`; empty for a single turn."""
    evaluation: bool = False  # True if nothing of it is trained
    begun: m.Partial | None = None  # A single turn that another engine had begun
    grown: Callable[[int, m.Partial], None] | None = None
    """Takes what a single turn has grown by, now and then."""


class RolloutPolicy:
    """The policy of one rollout, by the engine of this process (`generator.engine.Engine`).

    `name` is that of the rollout in the run, from which the noise of its turns follows; empty: any
    noise. `count_running` is told +1 when a turn begins to be decoded, -1 at its end.
    """

    def __init__(
        self, engine: Any, temperature: float, name: str, count_running: Callable[[int], None]
    ) -> None:
        self._engine, self._temperature, self._name = engine, temperature, name
        self._count_running, self._turns = count_running, 0
        self.tokenizer = engine.tokenizer  # the model's, with transformers' interface
        self.max_tokens: int = engine.max_tokens
        """Longest sequence that the engine takes, prompt and all turns."""
        self.forced_tokens = 0 if engine.interruption is None else len(engine.interruption.phrase)
        """Most tokens that are forced into a turn."""
        self.new_tokens = 0  # tokens of its turns that this engine made

    async def generate(
        self,
        token_ids: list[int],
        limits: m.TurnLimits,
        *,
        begun: m.Partial | None = None,
        grown: Callable[[int, m.Partial], None] | None = None,
    ) -> Completion:
        """Sample one turn after these tokens, under the interruption rule (`Engine.complete`).

        Raises:
            ValueError: tokens and limits exceed `max_tokens`, or `begun` cannot be continued.
        """
        name = self._name + (f" turn {self._turns}" if self._name and self._turns else "")
        self._turns += 1
        self._count_running(+1)
        try:
            turn: Completion = await self._engine.complete(
                token_ids, limits.thinking, limits.answer, self._temperature, begun, grown, name
            )
        finally:
            self._count_running(-1)
        self.new_tokens += len(turn.token_ids) - (begun.num_tokens if begun else 0)
        return turn


RolloutFunction = Callable[[RolloutPrompt, RolloutPolicy], Awaitable["Rollout"]]


@dataclass(slots=True)
class Rollout:
    """The tokens of a rollout with their origins, grown turn by turn."""

    token_ids: list[int] = field(default_factory=list)
    """All tokens after the question's prompt; those of a `prompt` segment are among them."""
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token at sampling time; 0.0 for tokens that were not sampled."""
    spans: list[m.VersionSpan] = field(default_factory=list)
    """Weight versions, without gaps; tokens that were not sampled belong to a neighbor's."""
    segments: list[m.Segment] = field(default_factory=list)  # origins, without gaps
    finish_reason: Literal["", "stop", "length"] = ""
    """`length`: a budget of tokens or turns was used up."""
    verdict: Verdict | None = None
    """The environment's own; None: the task's verifier judges the last turn."""
    turn_rewards: list[float] = field(default_factory=list)
    """The environment's reward of each turn, whose sum is that of the verdict; empty without."""
    tool_calls: int = 0  # calls that the policy made, failed ones included
    routes: list[RoutedExperts] = field(default_factory=list)
    """[N, L, K] of each sequence with its prompt, as far as they are known; empty without."""

    @property
    def turns(self) -> int:
        """Number of the policy's turns."""
        return len(m.turn_ranges(self.segments))

    def prompt(self, token_ids: Sequence[int]) -> None:
        """Begin a sequence of its own: what follows is sampled after these tokens alone."""
        self._append("prompt", token_ids)

    def give(self, token_ids: Sequence[int]) -> None:
        """Append tokens of a tool, an environment or the chat template."""
        self._append("given", token_ids)

    def add(self, turn: Completion) -> None:
        """Append a turn of the policy."""
        offset, (first, end) = len(self.token_ids), turn.forced
        length = len(turn.token_ids)
        parts: tuple[tuple[Any, int, int], ...] = (("sampled", 0, length),)
        if end:
            parts = ("sampled", 0, first), ("forced", first, end), ("sampled", end, length)
        self.segments += [m.Segment(k, offset + a, offset + b) for k, a, b in parts if a < b]
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        for span in turn.spans:
            begin = offset + span.start if self.spans else 0
            extend_spans(self.spans, span.version, begin, offset + span.end)
        self.finish_reason = turn.finish_reason  # type: ignore[assignment]
        if (routes_NLK := turn.routes_NLK) is not None:
            if len(self.routes) < len(m.sequence_ranges(self.segments)):
                self.routes.append(routes_NLK[:0])
            held = self.routes[-1]
            self.routes[-1] = np.concatenate([held, routes_NLK[len(held) :]])

    def _append(self, kind: Any, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        start, end = len(self.token_ids), len(self.token_ids) + len(token_ids)
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.segments.append(m.Segment(kind, start, end))
        if self.spans:
            extend_spans(self.spans, self.spans[-1].version, start, end)
