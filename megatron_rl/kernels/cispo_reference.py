"""The row operators in plain torch: the fallback without a compiler, and the reference of tests.

Same schemas and results as `csrc`, on any device. Logits are fp32 [C, V]. Targets are ids of the
whole vocabulary, of which this shard holds those from `first`; columns from `columns` on are
padding without probability; `scale` is 1 / temperature. Shape legend: C rows, V columns of this
rank's vocabulary shard, R shards.
"""

import torch
from torch import Tensor

NO_TOP = -3.0e38
"""Largest logit of an empty row: finite, so that empty parts merge to 0 and not to NaN."""


def _columns(logits_CV: Tensor, targets_C: Tensor, first: int, columns: int) -> tuple[Tensor, ...]:
    column_C = targets_C - first
    here_C = (column_C >= 0) & (column_C < columns)
    return logits_CV[:, :columns], torch.where(here_C, column_C, 0), here_C


def row_stats(
    logits_CV: Tensor, targets_C: Tensor, first: int, columns: int, scale: float
) -> Tensor:
    """Return [4, C]: top logit, sum of e^d, sum of d e^d, target's logit; d = scale (x - top)."""
    x_CV, column_C, here_C = _columns(logits_CV, targets_C, first, columns)
    if not columns:
        empty_4 = logits_CV.new_tensor([NO_TOP, 0.0, 0.0, float("-inf")])
        return empty_4[:, None].repeat(1, len(logits_CV))
    top_C = x_CV.amax(1).clamp(min=NO_TOP)
    d_CV = (x_CV - top_C[:, None]) * scale
    e_CV = d_CV.exp()
    target_C = torch.where(here_C, x_CV.gather(1, column_C[:, None])[:, 0], float("-inf"))
    return torch.stack([top_C, e_CV.sum(1), (d_CV.clamp(min=-1e4) * e_CV).sum(1), target_C])


def merge_rows(stats_R4C: Tensor, scale: float) -> Tensor:
    """Return [4, C]: log-prob, entropy, largest logit and sum of e^d over all shards."""
    top_C = stats_R4C[:, 0].amax(0)
    d_RC = ((stats_R4C[:, 0] - top_C) * scale).clamp(min=-1e4)
    e_RC = d_RC.exp()
    mass_C = (stats_R4C[:, 1] * e_RC).sum(0)
    moment_C = (e_RC * (stats_R4C[:, 2] + d_RC * stats_R4C[:, 1])).sum(0)
    log_C = mass_C.log()
    logprobs_C = (stats_R4C[:, 3].amax(0) - top_C) * scale - log_C
    return torch.stack([logprobs_C, (log_C - moment_C / mass_C).clamp(min=0.0), top_C, mass_C])


def cispo_terms(
    logprobs_C: Tensor,
    generator_logprobs_C: Tensor,
    advantages_C: Tensor,
    weights_C: Tensor,
    max_ratio: float,
) -> Tensor:
    """Return [3, C]: ratio, coefficient dL/dlogp = -w A min(ratio, cap), loss term."""
    ratio_C = (logprobs_C - generator_logprobs_C).exp()
    c_C = torch.where(weights_C == 0, 0.0, -weights_C * advantages_C * ratio_C.clamp(max=max_ratio))
    return torch.stack([ratio_C, c_C, torch.where(c_C == 0, 0.0, c_C * logprobs_C)])


def row_grads_(
    logits_CV: Tensor,
    targets_C: Tensor,
    first: int,
    columns: int,
    scale: float,
    top_C: Tensor,
    mass_C: Tensor,
    coefficients_C: Tensor,
    bf16: bool,
) -> None:
    """Replace logits by c scale (onehot - p); bf16 results take the front half of each row."""
    x_CV, column_C, here_C = _columns(logits_CV, targets_C, first, columns)
    if columns:
        k_C = coefficients_C * scale
        x_CV.sub_(top_C[:, None]).mul_(scale).exp_().mul_((-k_C / mass_C)[:, None])
        x_CV.scatter_add_(1, column_C[:, None], (k_C * here_C)[:, None])
        x_CV.masked_fill_((coefficients_C == 0)[:, None], 0.0)
    logits_CV[:, columns:] = 0.0
    if bf16:
        width = logits_CV.shape[1]
        for row in logits_CV:  # row by row: no second [C, V]
            row.view(torch.bfloat16)[:width] = row.bfloat16()


def cispo_rows_(
    logits_CV: Tensor,
    targets_C: Tensor,
    first: int,
    columns: int,
    scale: float,
    generator_logprobs_C: Tensor,
    advantages_C: Tensor,
    weights_C: Tensor,
    max_ratio: float,
    bf16: bool,
) -> Tensor:
    """Return [5, C]: log-prob, entropy, ratio, coefficient, loss; logits become their gradient."""
    stats_4C = row_stats(logits_CV, targets_C, first, columns, scale)
    logprobs_C, entropy_C, top_C, mass_C = merge_rows(stats_4C[None], scale)
    terms_3C = cispo_terms(logprobs_C, generator_logprobs_C, advantages_C, weights_C, max_ratio)
    row_grads_(
        logits_CV, targets_C, first, columns, scale, top_C, mass_C, terms_3C[1].contiguous(), bf16
    )
    return torch.cat([logprobs_C[None], entropy_C[None], terms_3C])
