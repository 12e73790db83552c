"""The outputs of a run's rows: metrics.jsonl first, then the mirrors and the terminal."""

from megatron_rl.config import RunConfig
from megatron_rl.metrics.metrics_file import MetricsWriter, Row
from megatron_rl.metrics.mirrors import TensorBoardMirror, WandbMirror
from megatron_rl.metrics.terminal import ProgressLog


class RunSink:
    """Writes each row to all outputs of a configuration; it closes `writer` with itself.

    A run that is resumed starts at `first_step`.

    Raises:
        MirrorError: a configured mirror is not installed, or did not start.
    """

    def __init__(self, config: RunConfig, writer: MetricsWriter, first_step: int = 0) -> None:
        self.writer, folder = writer, config.output_dir
        self.mirrors: list[WandbMirror | TensorBoardMirror] = []
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
        for mirror in self.mirrors:
            mirror.log(row)
        if self.progress is not None:
            self.progress.update(row)

    def note(self, text: str) -> None:
        """Print an activity apart from the steps."""
        if self.progress is not None:
            self.progress.note(text)

    def close(self) -> None:
        """Close all outputs."""
        self.writer.close()
        for mirror in self.mirrors:
            mirror.close()
