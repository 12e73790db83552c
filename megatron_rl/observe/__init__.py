"""What a run shows of itself: metrics.jsonl (the truth), its mirrors, the terminal, the report."""

from megatron_rl.observe.metrics import MetricsError, MetricsWriter, read_metrics
from megatron_rl.observe.names import METRICS

__all__ = ["METRICS", "MetricsError", "MetricsWriter", "read_metrics"]
