"""Metrics of a run: metrics.jsonl (the source of truth), mirrors, terminal and report."""

from megatron_rl.metrics.metrics_file import METRICS, MetricsError, MetricsWriter, read_metrics
from megatron_rl.metrics.rollouts import read_rollouts

__all__ = ["METRICS", "MetricsError", "MetricsWriter", "read_metrics", "read_rollouts"]
