"""What a run shows of itself: metrics.jsonl (the truth), its mirrors, the terminal, the report."""

from megatron_rl.metrics.metrics_file import MetricsError, MetricsWriter, read_metrics
from megatron_rl.metrics.names import METRICS

__all__ = ["METRICS", "MetricsError", "MetricsWriter", "read_metrics"]
