"""Verdicts on answers of competition mathematics."""

from megatron_rl.rewards.math.judge import judge

__all__ = ["judge"]
