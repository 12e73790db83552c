"""GSPO: PPO's clip on the length-normalized ratio of whole sequences.

    s_i = exp( mean_t (log pi(y_it) - log pi_old(y_it)) ),
    L   = sum_it  -w_it * min(s_i A_i, clip(s_i, low, high) A_i)

(arXiv 2507.18071, equations 5 to 7.) The gradient of a token is that of equation 13 (GSPO-token):
dL/dlogp_it = -w_it s_i A_i, or 0 where the sequence is clipped. The mean is over trained tokens, as
forced ones were not sampled. Bounds are closer to 1 than PPO's: 1 - 3e-4 and 1 + 4e-4 in the paper;
ScaleRL found 1 - 3e-3 and 1 + 5e-3 best, its gspo_5_3_e_3 (upper 5, lower 3).
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megatron_rl.algorithm.losses.base import Loss, LossTerms, RatioReference, Tokens
from megatron_rl.algorithm.losses.ppo import clipped_surrogate


class Gspo(Loss):
    """GSPO, the clipped ratio of sequences."""

    ratio_reference: ClassVar[RatioReference] = "old"
    per_token: ClassVar[bool] = False
    kind: Literal["gspo"] = "gspo"
    """Policy loss."""
    min_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.997
    """Lower bound of the sequence's ratio in ratio units (1 - the paper's eps_low)."""
    max_ratio: Annotated[float, Field(ge=1.0)] = 1.005
    """Upper bound of the sequence's ratio in ratio units (1 + the paper's eps_high)."""

    def terms(self, tokens: Tokens) -> LossTerms:
        """Return the terms; log-ratios .1 and .3 of a completion give both tokens ratio e^.2."""
        now_T = tokens.logprobs_T.detach()
        sequence_T = tokens.mean_by_sequence(now_T - tokens.old_logprobs_T)
        # Value s_i; gradient s_i at this token's own log-prob.
        ratio_T = (sequence_T + tokens.logprobs_T - now_T).exp()
        return clipped_surrogate(ratio_T, tokens.advantages_T, self.min_ratio, self.max_ratio)
