"""Forced-length interruption: one completion, grown from one or more engine requests.

The rule, in tokens of the completion:

1. Thinking has a budget. When its last token was sampled and none of them is the end marker, the
   interruption phrase (which ends with the marker) is appended: forced, not sampled.
2. The answer, all that follows the end marker, has at most `answer_budget` tokens, whether
   thinking was interrupted or ended by itself.
3. A completion that ends by itself (end-of-sequence) is `stop`; one that rule 2 cut is `length`.

So a completion is never longer than thinking budget + phrase + answer budget. An end marker that
is the budget's last token is a natural end. Each request asks for what the rule allows next, and
its output is the prompt of the following one: an engine needs to know nothing but `max_tokens`.

Without a phrase (`generation.interruption: none`) there is one budget for thinking and answer
together, the sum of both, and a completion that reaches it is `length`.

Example (budget 3, phrase "stop </think>", answer budget 2; E is end-of-sequence):
    sampled a b c        -> a b c [stop </think>] x E      `stop`, forced (3, 5)
    sampled a b </think> -> a b </think> x y               `length`, forced (0, 0)
    sampled a E          -> a E                            `stop`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.messages import VersionSpan
from megatron_rl.models.routed_experts import Routes


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine request sampled."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-prob of each token at sampling time."""
    spans: Sequence[VersionSpan]
    """Versions that made the tokens; `[start, end)` within this piece, without gaps."""
    finish_reason: str
    """`stop` or `length`."""
    routes_NLK: Routes | None = None
    """Experts of the request's tokens, prompt included, but the last one (`models.routes`)."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """What ends thinking."""

    phrase: Sequence[int]
    """Token ids that are forced; they end with the end marker."""
    end: Callable[[Sequence[int]], int]
    """Number of tokens up to the end of the first end marker among them, -1 if there is none."""


@dataclass(slots=True)
class Completion:
    """A completion under the interruption rule; `wanted` says how many tokens to sample next."""

    thinking_budget: int
    answer_budget: int
    interruption: Interruption | None
    """None: no interruption."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """0.0 for forced tokens."""
    spans: list[VersionSpan] = field(default_factory=list)
    """Cover the completion; forced tokens belong to the span before them."""
    forced: tuple[int, int] = (0, 0)
    finish_reason: str = ""
    """Empty as long as it is not complete."""
    routes_NLK: Routes | None = None
    """Experts of prompt and completion, as far as they are known. A token that was an input of
    several requests keeps those of the first, in which its successor was sampled."""
    _answer_start: int = -1

    @property
    def wanted(self) -> int:
        """Tokens that the next request may sample; 0 when complete."""
        if self.finish_reason:
            return 0
        if self.interruption is None:
            return self.thinking_budget + self.answer_budget - len(self.token_ids)
        if self._answer_start < 0:
            return self.thinking_budget - len(self.token_ids)
        return self._answer_start + self.answer_budget - len(self.token_ids)

    def add(self, piece: Piece) -> None:
        """Append what a request for `wanted` tokens sampled.

        Raises:
            ValueError: lengths of ids, log-probs and version spans disagree, or more tokens than
                wanted.
        """
        count = len(piece.token_ids)
        covered = [piece.spans[0].start, *(s.end for s in piece.spans)] if piece.spans else [0]
        if (
            len(piece.logprobs) != count
            or covered[0] != 0
            or covered[-1] != count
            or [s.start for s in piece.spans] != covered[:-1]
            or not 0 < count <= self.wanted
        ):
            raise ValueError(
                f"the engine returned {count} tokens (wanted at most {self.wanted}) with"
                f" {len(piece.logprobs)} log-probs and version spans {list(piece.spans)}; the"
                " lengths must agree: this vLLM version does not do what the generator relies on"
            )
        offset = len(self.token_ids)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        if piece.routes_NLK is not None:
            held = piece.routes_NLK[:0] if self.routes_NLK is None else self.routes_NLK
            self.routes_NLK = np.concatenate([held, piece.routes_NLK[len(held) :]])
        for span in piece.spans:
            self._extend_spans(span.version, offset + span.start, offset + span.end)
        if self.interruption is not None and self._answer_start < 0:
            self._answer_start = self.interruption.end(self.token_ids)
            if self._answer_start < 0 and piece.finish_reason == "length":
                self._force(self.interruption.phrase)
        self._finish(piece.finish_reason)

    def _force(self, phrase: Sequence[int]) -> None:
        start = len(self.token_ids)
        self.token_ids += phrase
        self.logprobs += [0.0] * len(phrase)
        self._answer_start = len(self.token_ids)
        self.forced = (start, self._answer_start)
        self._extend_spans(self.spans[-1].version, start, self._answer_start)

    def _finish(self, reason: str) -> None:
        if self.interruption is None:
            self.finish_reason = "stop" if reason == "stop" else "" if self.wanted else "length"
            return
        answer_end = self._answer_start + self.answer_budget
        if self._answer_start >= 0 and len(self.token_ids) > answer_end:
            self._cut(answer_end)
            self.finish_reason = "length"
        elif reason == "stop":
            self.finish_reason = "stop"
        elif self._answer_start >= 0 and len(self.token_ids) == answer_end:
            self.finish_reason = "length"

    def _cut(self, length: int) -> None:
        # Cutting a sampled sequence at a fixed place leaves the distribution of what stays as it
        # is: the same as never having asked for more.
        del self.token_ids[length:]
        del self.logprobs[length:]
        self.spans = [
            VersionSpan(s.version, s.start, min(s.end, length))
            for s in self.spans
            if s.start < length
        ]

    def _extend_spans(self, version: int, start: int, end: int) -> None:
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version, start, end))
