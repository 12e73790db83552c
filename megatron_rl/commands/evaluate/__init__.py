"""Evaluation of a checkpoint: estimators of pass rates and their errors."""

from megatron_rl.commands.evaluate.estimators import (
    Estimate,
    Row,
    by_difficulty,
    majority_at_n,
    mean_at_n,
    pass_at_k,
)

__all__ = ["Estimate", "Row", "by_difficulty", "majority_at_n", "mean_at_n", "pass_at_k"]
