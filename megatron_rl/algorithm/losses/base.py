"""What a loss is given, and what it returns: terms of single tokens, summed in one place.

Shape legend: T completion tokens of a micro-batch; S sequences of the step.

A loss works on tensors through their methods alone, so that the configuration, of which it is a
section, imports without torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from megatron_rl.section import Section

if TYPE_CHECKING:
    from torch import Tensor

Against = Literal["generator", "old", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Completion tokens of one micro-batch, all [T]; sequences are never split over micro-batches,
    but may be over ranks (context parallelism).

    Example: two completions of 2 and 1 tokens have `sequences_T = [0, 0, 1]`.
    """

    logprobs_T: Tensor
    """Under the trained policy, with gradient."""
    generator_logprobs_T: Tensor
    """The generator's own, at sampling time; 0 for forced tokens."""
    old_logprobs_T: Tensor
    """Under the old policy: the generator's, or the trainer's (`algorithm.old_policy`)."""
    advantages_T: Tensor
    loss_weights_T: Tensor
    """All normalisation; 0 for tokens that are not trained."""
    sequences_T: Tensor
    """int64: number of the token's sequence in the step."""
    sequences: int
    """Sequences of the step (S)."""
    entropy_T: Tensor | None = None
    """Entropy of the trained distribution, with gradient where the objective needs it [nats]."""
    reference_logprobs_T: Tensor | None = None
    """Under the frozen reference policy."""
    complete: bool = True
    """Whether all of the micro-batch's tokens are here, not a chunk of them."""
    add_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Sum of a tensor over the ranks that hold other tokens of these sequences; None: nobody does.
    All of them call it the same number of times."""

    @property
    def trained_T(self) -> Tensor:
        """Tokens with a loss weight above 0."""
        return self.loss_weights_T > 0

    def mean_by_sequence(self, values_T: Tensor) -> Tensor:
        """Mean of a sequence's trained tokens, at each of its tokens [T]; 0 where it has none.

        Values have no gradient: it would not reach the other ranks.

        Raises:
            RuntimeError: these are a chunk's tokens alone.
        """
        if not self.complete:
            raise RuntimeError(
                "a mean over a sequence was asked of some of its tokens: its loss or correction"
                " must say `per_token = False`"
            )
        trained_T = self.trained_T.to(values_T.dtype)
        zeros_2S = values_T.new_zeros(2 * self.sequences)
        sums_2S = zeros_2S.index_add(0, self.sequences_T, values_T * trained_T)
        sums_2S = sums_2S.index_add(0, self.sequences_T + self.sequences, trained_T)
        if self.add_over_ranks is not None:
            sums_2S = self.add_over_ranks(sums_2S)
        total_S, count_S = sums_2S.chunk(2)
        return (total_S / count_S.clamp(min=1.0)).index_select(0, self.sequences_T)


class Terms(NamedTuple):
    """What a loss says of each token."""

    loss_T: Tensor
    """Loss before weighting; its gradient by `logprobs_T` is the loss's claim."""
    cut_T: Tensor
    """bool: the ratio was cut at a bound, or the token was left without gradient for it."""


class Loss(Section):
    """Base of the policy losses; the minus sign is inside, so that all of them are minimised."""

    against: ClassVar[Against]
    """Whose log-probs the ratio is taken against: the generator's own by definition of the loss,
    the old policy's (`algorithm.old_policy` says which that is), or there is no ratio."""
    per_token: ClassVar[bool] = True
    """Whether a token's term follows from its own log-prob alone (no sums over a sequence)."""
    kind: str
    """Name of the loss."""

    @abstractmethod
    def terms(self, tokens: Tokens) -> Terms:
        """The loss of each token."""

    def summary(self) -> str:
        """Name and parameters in a few words."""
        given = {k: v for k, v in self.model_dump().items() if k != "kind" and v is not None}
        shown = ", ".join(
            f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in given.items()
        )
        return f"{self.kind} ({shown})" if shown else self.kind


def ratio_of(logprobs_T: Tensor, others_T: Tensor) -> Tensor:
    """exp(logprobs - others) [T]."""
    return (logprobs_T - others_T).exp()
