"""The outputs of a run's rows: metrics.jsonl first, then the mirrors and the terminal."""

import sys
from collections.abc import Callable, Sequence

from megatron_rl.config import RunConfig
from megatron_rl.metrics.metrics_file import MetricsWriter, Row
from megatron_rl.metrics.mirrors import TensorBoardMirror, WandbMirror
from megatron_rl.metrics.terminal import ProgressLog, shortened

SAMPLE_CHARACTERS = 2000
"""Most characters of a prompt, a completion or a reason in a mirror."""
Mirror = WandbMirror | TensorBoardMirror


class RunSink:
    """Writes each row to all outputs of a configuration; it closes `writer` with itself.

    A run that is resumed starts at `first_step`. A mirror that fails is left out from then on, with
    a warning.

    Raises:
        MirrorError: a configured mirror is not installed, or did not start.
    """

    def __init__(self, config: RunConfig, writer: MetricsWriter, first_step: int = 0) -> None:
        self.writer, folder = writer, config.output_dir
        self.mirrors: list[Mirror] = []
        if config.metrics.tensorboard:
            self.mirrors.append(TensorBoardMirror(folder, first_step))
        if (mode := config.metrics.wandb) != "off":
            dump = config.model_dump(mode="json")
            self.mirrors.append(WandbMirror(folder, mode=mode, first_step=first_step, config=dump))
        shown = config.metrics.terminal != "off"
        self.progress = ProgressLog(config.schedule.steps, first_step) if shown else None

    def write(self, kind: str, row: Row) -> None:
        """Write a step (`step`), an evaluation (`eval`, `sets`) or an event (`event`)."""
        row = self.writer.write(kind, row)
        self._mirror(lambda mirror: mirror.log(row))
        if self.progress is not None:
            self.progress.update(row)

    def samples(self, rows: Sequence[Row]) -> None:
        """Show completions of a step, rows of rollout files, in the mirrors and on the terminal."""
        texts = ("prompt", "completion", "verdict_reason")
        short = [r | {n: shortened(r[n], SAMPLE_CHARACTERS) for n in texts} for r in rows]
        self._mirror(lambda mirror: mirror.samples(short))
        if self.progress is not None:
            self.progress.samples(rows)

    def note(self, text: str) -> None:
        """Print an activity apart from the steps."""
        if self.progress is not None:
            self.progress.note(text)

    def close(self) -> None:
        """Close all outputs."""
        self.writer.close()
        self._mirror(lambda mirror: mirror.close())

    def _mirror(self, act: Callable[[Mirror], None]) -> None:
        for mirror in list(self.mirrors):
            try:
                act(mirror)
            except Exception as e:  # noqa: BLE001 - none is worth the run
                self.mirrors.remove(mirror)
                name, problem = type(mirror).__name__, f"{type(e).__name__}: {e}"
                rest = "it gets nothing more; metrics.jsonl and the rollout files have all of it"
                print(f"warning: {name} failed ({problem}): {rest}", file=sys.stderr)
