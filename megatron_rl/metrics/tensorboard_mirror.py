"""Mirror of metrics.jsonl to TensorBoard event files, through TensorBoard's own writer (no torch).

Rows become `train/<name>` and `eval/<name>` at their step. Each start of a run writes a new event
file that begins with TensorBoard's session marker, which hides what older files have from that
step on: the chart shows one curve, as metrics.jsonl does.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megatron_rl.metrics.mirror import PREFIX, MirrorError, histogram, scalars

FLUSH_SECONDS = 10


class TensorBoardMirror:
    """Event files in `<output_dir>/tensorboard`.

    Args:
        output_dir: the run's folder.
        first_step: updates already made; older points from this step on are hidden.

    Raises:
        MirrorError: tensorboard is not installed.
    """

    def __init__(self, output_dir: str | Path, first_step: int = 0) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as e:
            raise MirrorError(
                "metrics.tensorboard is on and tensorboard is not installed:"
                " pip install 'megatron_rl[io]', or metrics.tensorboard=false"
            ) from e
        self._events, self._summaries = event_pb2, summary_pb2
        folder = Path(output_dir) / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_SECONDS)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(
            event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start)
        )

    def log(self, kind: str, step: int, row: dict[str, Any]) -> None:
        """Copy a row of kind `step` or `eval`; other kinds, text and lists are left out."""
        prefix = PREFIX.get(kind)
        if prefix is None:
            return
        values = [
            self._summaries.Summary.Value(tag=f"{prefix}/{name}", simple_value=value)
            for name, value in scalars(row).items()
        ]
        for name, value in row.items():
            if bins := histogram(value):
                values.append(
                    self._summaries.Summary.Value(tag=f"{prefix}/{name}", histo=self._histo(bins))
                )
        summary = self._summaries.Summary(value=values)
        when = row.get("unix_seconds") or time.time()
        self._writer.add_event(self._events.Event(wall_time=when, step=step, summary=summary))

    def close(self) -> None:
        """Write out what is queued and close the file."""
        self._writer.close()

    def _histo(self, bins: list[tuple[float, float]]) -> Any:
        return self._summaries.HistogramProto(
            min=bins[0][0],
            max=bins[-1][0],
            num=sum(n for _, n in bins),
            sum=sum(x * n for x, n in bins),
            sum_squares=sum(x * x * n for x, n in bins),
            bucket_limit=[x + 0.5 for x, _ in bins],
            bucket=[n for _, n in bins],
        )
