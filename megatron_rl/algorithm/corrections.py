"""Importance correction between generator and trainer: a detached factor on a token's loss.

A ratio to the trainer's old policy ignores the difference between the generator and that policy
(other kernels, other precision, and older weights under PipelineRL). With
`c_t = pi_old(y_t) / pi_gen(y_t)`:

    none              1
    token_truncation  min(c_t, cap)                               (TIS)
    token_mask        c_t where low <= c_t <= high, else 0        (IcePop)
    sequence_mask     0 where A < 0 and mean_t (log pi_gen - log pi) > bound, else 1
                      (DeepSeek-V3.2, arXiv 2512.02556)

For REINFORCE, which has no old policy, `pi_old` is the current one. Losses with a ratio to the
generator need no correction (`none`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveFloat

from megatron_rl.algorithm.losses.base import Tokens, ratio_of
from megatron_rl.section import Section

if TYPE_CHECKING:
    from torch import Tensor


class Factor(NamedTuple):
    """The correction of each token, without gradient."""

    factor_T: Tensor
    corrected_T: Tensor  # bool: truncated or masked


class Correction(Section):
    """Base of the importance corrections."""

    per_token: ClassVar[bool] = True
    """A factor depends on its own token's log-probs only (no sums over a sequence)."""
    kind: str
    """Name of the correction."""

    @abstractmethod
    def factor(self, tokens: Tokens) -> Factor:
        """Return the factor of each token's loss."""


class NoCorrection(Correction):
    """No correction: the factor is 1."""

    kind: Literal["none"] = "none"
    """Importance correction."""

    def factor(self, tokens: Tokens) -> Factor:
        """Return 1 for all tokens."""
        one_T = tokens.loss_weights_T.new_ones(())
        return Factor(one_T, ~one_T.bool())


class TokenTruncation(Correction):
    """Truncated importance sampling: min(pi_old / pi_gen, cap)."""

    kind: Literal["token_truncation"] = "token_truncation"
    """Importance correction."""
    max_ratio: PositiveFloat = 2.0
    """Cap on pi_old / pi_gen."""

    def factor(self, tokens: Tokens) -> Factor:
        """Return the factors; ratios .5 and 3 under cap 2 give .5 and 2."""
        ratio_T = ratio_of(tokens.old_logprobs_T, tokens.generator_logprobs_T).detach()
        return Factor(ratio_T.clamp(max=self.max_ratio), ratio_T > self.max_ratio)


class TokenMask(Correction):
    """IcePop: pi_old / pi_gen inside a range, 0 outside."""

    kind: Literal["token_mask"] = "token_mask"
    """Importance correction."""
    min_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Tokens with pi_old / pi_gen below this are masked."""
    max_ratio: Annotated[float, Field(ge=1.0)] = 5.0
    """Tokens with pi_old / pi_gen above this are masked."""

    def factor(self, tokens: Tokens) -> Factor:
        """Return the factors; ratios .4, .8 and 6 in [.5, 5] give 0, .8 and 0."""
        ratio_T = ratio_of(tokens.old_logprobs_T, tokens.generator_logprobs_T).detach()
        outside_T = (ratio_T < self.min_ratio) | (ratio_T > self.max_ratio)
        return Factor(ratio_T.masked_fill(outside_T, 0.0), outside_T)


class SequenceMask(Correction):
    """Off-policy sequence masking: leave out drifted sequences of negative advantage."""

    per_token: ClassVar[bool] = False
    kind: Literal["sequence_mask"] = "sequence_mask"
    """Importance correction."""
    max_drift_nats: PositiveFloat = 0.1
    """Mask sequences whose mean of log pi_gen - log pi over the tokens exceeds this."""

    def factor(self, tokens: Tokens) -> Factor:
        """Return the factors; A = -1 and gaps .3 and .1 (mean .2 > .1) give 0 and 0."""
        drift_T = tokens.mean_by_sequence(tokens.generator_logprobs_T - tokens.logprobs_T.detach())
        masked_T = (tokens.advantages_T < 0) & (drift_T > self.max_drift_nats)
        return Factor((~masked_T).to(drift_T.dtype), masked_T)


CorrectionChoice = Annotated[
    NoCorrection | TokenTruncation | TokenMask | SequenceMask, Field(discriminator="kind")
]
"""The value of `algorithm.correction`."""
