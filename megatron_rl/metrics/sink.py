"""Where the rows of a run go: metrics.jsonl first, then the mirrors and the terminal."""

from __future__ import annotations

from typing import Any, Self

from megatron_rl.config import RunConfig
from megatron_rl.metrics.metrics_file import MetricsWriter
from megatron_rl.metrics.tensorboard_mirror import TensorBoardMirror
from megatron_rl.metrics.terminal import TerminalView
from megatron_rl.metrics.wandb_mirror import WandbMirror

Row = dict[str, Any]


class RunSink:
    """The observers that a configuration asks for, behind one set of calls.

    Args:
        config: `output_dir`, `metrics` and `schedule.steps` are read.
        writer: metrics.jsonl; closed with the sink.
        first_step: updates already made (a resumed run).

    Raises:
        MirrorError: a mirror that is asked for is not installed, or did not start.
    """

    def __init__(self, config: RunConfig, writer: MetricsWriter, first_step: int = 0) -> None:
        self.writer = writer
        self.mirrors: list[WandbMirror | TensorBoardMirror] = []
        if config.metrics.tensorboard:
            self.mirrors.append(TensorBoardMirror(config.output_dir, first_step))
        if config.metrics.wandb != "off":
            self.mirrors.append(
                WandbMirror(
                    config.output_dir,
                    mode=config.metrics.wandb,
                    first_step=first_step,
                    config=config.model_dump(mode="json"),
                )
            )
        self.terminal = TerminalView(
            config.schedule.steps, config.metrics.terminal, first_step=first_step
        )

    def step(self, row: Row) -> None:
        """One optimizer step."""
        self._show(self.writer.step(row))

    def eval(self, row: Row) -> None:
        """One evaluation."""
        self._show(self.writer.eval(row))

    def event(self, row: Row) -> None:
        """Something that happened, named by `row["event"]`."""
        self.writer.event(row)

    def note(self, text: str) -> None:
        """Say on the terminal what goes on beside the steps."""
        self.terminal.note(text)

    def tick(self) -> None:
        """Called now and then, so that the terminal follows its size."""
        self.terminal.tick()

    def close(self) -> None:
        """End all observers; the terminal is given back first."""
        self.terminal.close()
        self.writer.close()
        for mirror in self.mirrors:
            mirror.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, row: Row) -> None:
        for mirror in self.mirrors:
            mirror.log(row["kind"], row["step"], row)
        self.terminal.update(row)
