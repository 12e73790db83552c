"""Forced-length interruption: one completion, grown from one or more engine requests.

The rule, in tokens of the completion:

1. Thinking has a budget. When its last token was sampled and none of them is the end marker, the
   interruption phrase (which ends with the marker) is appended: forced, not sampled.
2. The answer, all that follows the end marker, has at most `answer_budget` tokens, whether
   thinking was interrupted or ended by itself.
3. A completion that ends by itself (end-of-sequence) is `stop`, one truncated by rule 2 `length`.

So a completion is never longer than thinking budget + phrase + answer budget. An end marker that
is the budget's last token is a natural end. Each request may sample what the rule allows next, and
its output is the prompt of the following one: an engine needs to know nothing but `max_tokens`.

Without a phrase (`generation.interruption: none`) there is one budget for thinking and answer
together, the sum of both, and a completion that reaches it is `length`.

Example (budget 3, phrase "stop </think>", answer budget 2; E is end-of-sequence):
    sampled a b c        -> a b c [stop </think>] x E      `stop`, forced (3, 5)
    sampled a b </think> -> a b </think> x y               `length`, forced (0, 0)
    sampled a E          -> a E                            `stop`

A completion is known by its tokens and its forced range alone: cut anywhere, it goes on elsewhere
as if it had never been cut (`Completion.begin`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.messages import Partial, VersionSpan, float_bytes, floats, int_bytes, ints
from megatron_rl.models.routed_experts import RoutedExperts

BLOCK = 64  # tokens that are decoded at a time in the search for an end marker


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens that an engine request sampled, one after the other."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]  # at sampling time
    spans: Sequence[VersionSpan]  # `[start, end)` within these tokens, without gaps
    finish_reason: str  # `stop` or `length`; empty while the request goes on


@dataclass(frozen=True, slots=True)
class Interruption:
    """The end of thinking: the ids that are forced, which end with the end marker, and `end`."""

    phrase: Sequence[int]
    end: Callable[[Sequence[int], int], int]
    """Number of tokens up to the end of the first end marker among them, -1 without one. So many
    of the tokens are known to have none."""


@dataclass(slots=True)
class Completion:
    """A completion under the interruption rule; `wanted` is the tokens to sample next."""

    thinking_budget: int
    answer_budget: int
    interruption: Interruption | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # 0.0 for forced tokens
    spans: list[VersionSpan] = field(default_factory=list)
    """Cover the completion; forced tokens belong to the span before them."""
    forced: tuple[int, int] = (0, 0)
    finish_reason: str = ""  # as long as it is not complete
    routes_NLK: RoutedExperts | None = None
    """Experts of prompt and completion, as far as they are known. A token that was an input of
    several requests keeps those of the first, in which its successor was sampled."""
    _answer_start: int = -1
    _searched: int = 0  # tokens that are known to have no end marker

    def begin(self, begun: Partial) -> None:
        """Take the beginning that another engine made; ValueError: not one under this rule."""
        ids, (start, end) = ints(begun.token_ids).tolist(), begun.forced
        logprobs = floats(begun.logprobs).tolist()
        phrase = [] if self.interruption is None else list(self.interruption.phrase)
        whole = end - start == len(phrase) or end == len(ids)
        as_forced = start == self.thinking_budget and ids[start:end] == phrase[: end - start]
        valid = _agree(len(ids), logprobs, begun.spans)
        valid = valid and (end == 0 or (start < end and as_forced and whole))
        if valid:
            self.token_ids, self.logprobs = ids, logprobs
            self.spans, self.forced = list(begun.spans), begun.forced
            if end:
                self._interrupt()
            elif ids:
                self._search(cut=len(ids) == self.thinking_budget)
            valid = self.wanted >= 0
        if not valid:
            raise ValueError(
                f"a completion was begun with {len(ids)} tokens, {len(logprobs)} log-probs,"
                f" version spans {begun.spans} and forced range {begun.forced}: that is no"
                f" beginning under thinking budget {self.thinking_budget} and answer budget"
                f" {self.answer_budget}; all generators need one configuration and one release"
            )
        if ids:
            self._finish("")

    def since(self, start: int) -> Partial:
        """Return the tokens from `start` on, with spans and forced range of the whole."""
        ids, logprobs = int_bytes(self.token_ids[start:]), float_bytes(self.logprobs[start:])
        return Partial(ids, logprobs, list(self.spans), self.forced)

    @property
    def wanted(self) -> int:
        """Tokens that the next request may sample; 0 when complete."""
        if self.finish_reason:
            return 0
        if self.interruption is not None and self._answer_start < 0:
            return self.thinking_budget - len(self.token_ids)
        thinking = self.thinking_budget if self.interruption is None else self._answer_start
        return thinking + self.answer_budget - len(self.token_ids)

    def add(self, sampled: SampledTokens) -> None:
        """Append tokens of a request for `wanted`; ValueError: more, or lengths that disagree."""
        count, spans, most = len(sampled.token_ids), sampled.spans, self.wanted
        if self.interruption is not None:  # a request may sample up to the budget of thinking
            most = max(most, self.thinking_budget - len(self.token_ids))
        if not _agree(count, sampled.logprobs, spans) or not 0 < count <= most:
            raise ValueError(
                f"the engine returned {count} tokens (wanted at most {most}) with"
                f" {len(sampled.logprobs)} log-probs and version spans {list(spans)}; the lengths"
                " must agree: unsupported behavior of this vLLM release"
            )
        offset = len(self.token_ids)
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        for span in spans:
            extend_spans(self.spans, span.version, offset + span.start, offset + span.end)
        if self._answer_start < 0:
            self._search(cut=sampled.finish_reason == "length")
        self._finish(sampled.finish_reason)

    def add_routes(self, routes_NLK: RoutedExperts) -> None:
        """Take the experts of all inputs of a request that is at its end."""
        held = routes_NLK[:0] if self.routes_NLK is None else self.routes_NLK
        self.routes_NLK = np.concatenate([held, routes_NLK[len(held) :]])

    def _search(self, *, cut: bool) -> None:
        """Look for the end of thinking; if it was `cut` at its budget without one, interrupt."""
        if self.interruption is not None:
            self._answer_start = self.interruption.end(self.token_ids, self._searched)
            self._searched = len(self.token_ids)
            if self._answer_start < 0 and cut:
                self._interrupt()

    def _interrupt(self) -> None:
        """Append the phrase, or what is missing of it."""
        assert self.interruption is not None
        length = len(self.token_ids)
        start = self.forced[0] if self.forced[1] else length
        self._answer_start = start + len(self.interruption.phrase)
        self.forced = (start, self._answer_start)
        if length < self._answer_start:
            missing = self.interruption.phrase[length - start :]
            self.token_ids += missing
            self.logprobs += [0.0] * len(missing)
            extend_spans(self.spans, self.spans[-1].version, length, self._answer_start)

    def _finish(self, reason: str) -> None:
        if self.interruption is None:
            self.finish_reason = "stop" if reason == "stop" else "" if self.wanted else "length"
            return
        answer_end = self._answer_start + self.answer_budget
        if self._answer_start >= 0 and len(self.token_ids) > answer_end:
            # Truncating a sampled sequence at a fixed position leaves the distribution of the rest
            # as it is: the same as never having sampled more.
            del self.token_ids[answer_end:], self.logprobs[answer_end:]
            kept = [s for s in self.spans if s.start < answer_end]
            self.spans = [VersionSpan(s.version, s.start, min(s.end, answer_end)) for s in kept]
            self.finish_reason = "length"
        elif reason == "stop":
            self.finish_reason = "stop"
        elif self._answer_start >= 0 and len(self.token_ids) == answer_end:
            self.finish_reason = "length"


def extend_spans(spans: list[VersionSpan], version: int, start: int, end: int) -> None:
    """Append a span, as a part of the last one if that is of the same version."""
    if spans and spans[-1].version == version:
        start = spans.pop().start
    spans.append(VersionSpan(version, start, end))


def _agree(count: int, logprobs: Sequence[float], spans: Sequence[VersionSpan]) -> bool:
    """Return True if these are of so many tokens, without gaps."""
    ends = [0, *(span.end for span in spans)]
    starts = [span.start for span in spans]
    return len(logprobs) == count == ends[-1] and starts == ends[:-1]


class EndMarker:
    """The end-of-thinking marker under a tokenizer.

    Vocabularies made for thinking have it as one token. In others it is several, and a model may
    spell it in more than one way (Llama 3: `</`, `think`, `>`, but also `.</`, ...), so it is
    searched in the text. The tokenizer is one of Hugging Face's interface.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        self.text, self._tokenizer = text, tokenizer
        ids = tokenizer.encode(text, add_special_tokens=False)
        self._token = ids[0] if len(ids) == 1 else None

    def end(self, token_ids: Sequence[int], searched: int = 0) -> int:
        r"""Return the number of tokens up to the end of the first marker; -1 without one.

        The first `searched` tokens are known to have none.

        Example: `</`, `think`, `>\n`, `4`: 3.
        """
        if self._token is not None:
            rest = token_ids[searched:]
            return searched + rest.index(self._token) + 1 if self._token in rest else -1
        for start in range(searched, len(token_ids), BLOCK):
            # A marker that began before this block has at least a character in each token.
            first, last = max(0, start - len(self.text)), min(start + BLOCK, len(token_ids))
            if self.text in self._decode(token_ids[first:last]):
                ends = range(start + 1, last + 1)
                return next(n for n in ends if self.text in self._decode(token_ids[first:n]))
        return -1

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Return True if the tokens end with the marker."""
        if self._token is not None and token_ids[-1] != self._token:
            return False
        return self._decode(token_ids).endswith(self.text)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
