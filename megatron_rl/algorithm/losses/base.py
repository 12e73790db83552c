"""The interface of losses: tokens in, one loss term per token out.

Shape legend: T completion tokens of a micro-batch; S sequences of the step.

Losses are sections of the configuration, which imports without torch: they use the methods of
tensors only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from megatron_rl.section import Section

if TYPE_CHECKING:
    from torch import Tensor

RatioReference = Literal["generator", "old", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Completion tokens [T] of a micro-batch, of whole sequences except under context parallelism.

    Example: two completions of 2 and 1 tokens have `sequences_T = [0, 0, 1]`.
    """

    logprobs_T: Tensor  # under the trained policy, with gradient
    generator_logprobs_T: Tensor  # the generator's own, at sampling time; 0 for forced tokens
    old_logprobs_T: Tensor  # the generator's, or the trainer's (`algorithm.old_policy`)
    advantages_T: Tensor
    loss_weights_T: Tensor  # all normalization; 0 for tokens that are not trained
    sequences_T: Tensor  # int64: number of the token's sequence in the step
    sequences: int  # sequences of the step (S)
    entropy_T: Tensor | None = None  # [nats], with gradient if the objective needs it
    reference_logprobs_T: Tensor | None = None  # under the frozen reference policy
    complete: bool = True  # True for all tokens of the micro-batch, False for a chunk of them
    add_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Sum of a tensor over the ranks that hold other tokens of these sequences; None without such
    ranks. Collective: all of them call it the same number of times."""

    @property
    def trained_T(self) -> Tensor:
        """Tokens with a loss weight above 0."""
        return self.loss_weights_T > 0

    def mean_by_sequence(self, values_T: Tensor) -> Tensor:
        """Return the mean over the trained tokens of a sequence, at each of its tokens [T].

        The mean is 0 without trained tokens. Values must not have a gradient: it would not reach
        the other ranks.

        Raises:
            RuntimeError: these tokens are a chunk of the micro-batch.
        """
        if not self.complete:
            raise RuntimeError(
                "a mean over sequences needs all of their tokens: set `per_token = False` in the"
                " loss or correction that calls it"
            )
        trained_T = self.trained_T.to(values_T.dtype)
        zeros_2S = values_T.new_zeros(2 * self.sequences)
        sums_2S = zeros_2S.index_add(0, self.sequences_T, values_T * trained_T)
        sums_2S = sums_2S.index_add(0, self.sequences_T + self.sequences, trained_T)
        if self.add_over_ranks is not None:
            sums_2S = self.add_over_ranks(sums_2S)
        total_S, count_S = sums_2S.chunk(2)
        return (total_S / count_S.clamp(min=1.0)).index_select(0, self.sequences_T)


class LossTerms(NamedTuple):
    """The loss of each token."""

    loss_T: Tensor  # unweighted loss; its gradient by `logprobs_T` defines the algorithm
    clipped_T: Tensor  # bool: the ratio was clipped at a bound, or the token was masked for it


class Loss(Section):
    """Base of the policy losses. They are minimized: the minus sign is inside."""

    ratio_reference: ClassVar[RatioReference]
    """Policy in the denominator of the ratio: the generator by definition of the loss, the old
    policy (chosen by `algorithm.old_policy`), or none if the loss has no ratio."""
    per_token: ClassVar[bool] = True
    """A term depends on its own token's log-prob only (no sums over a sequence)."""
    kind: str
    """Name of the loss."""

    @abstractmethod
    def terms(self, tokens: Tokens) -> LossTerms:
        """Return the loss of each token."""

    def summary(self) -> str:
        """Return the name and the parameters in a few words."""
        fields = self.model_dump(exclude={"kind"}, exclude_none=True).items()
        shown = [f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in fields]
        return f"{self.kind} ({', '.join(shown)})" if shown else self.kind


def ratio_of(logprobs_T: Tensor, others_T: Tensor) -> Tensor:
    """Return exp(logprobs - others) [T]."""
    return (logprobs_T - others_T).exp()
