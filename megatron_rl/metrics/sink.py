"""The outputs of a run's rows: metrics.jsonl, its mirrors (TensorBoard, wandb) and the terminal.

A row becomes `train/<name>` (kind `step`) or `eval/<name>` (evaluations) at its step, without text,
null and lists. Samples of completions (`SAMPLE`) are text, whose length `shortened` has bounded.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from megatron_rl.config import RunConfig
from megatron_rl.metrics.metrics_file import MetricsWriter, Row
from megatron_rl.metrics.terminal import ProgressLog, shortened

PREFIX = {"step": "train", "eval": "eval", "sets": "eval"}  # kind of a row -> prefix of its names
SAMPLE = ("step", "task", "prompt", "completion", "verdict", "verdict_reason", "reward")
SAMPLE_CHARACTERS = 2000  # most of a prompt, a completion or a reason in a mirror
TABLE_ROWS = 64  # most samples of wandb's table: the newest
NOT_SHOWN = frozenset({"kind", "step", "unix_seconds", "nonfinite"})


class MirrorError(RuntimeError):
    """A configured mirror cannot start; the message names the option and the remedy."""

    @classmethod
    def not_installed(cls, name: str, off: str) -> Self:
        """Return the error of a package that is not there; `off` is the option without it."""
        remedy = f"pip install 'megatron_rl[io]', or metrics.{name}={off}"
        return cls(f"metrics.{name} is on and {name} is not installed: {remedy}")


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row, of its tasks and of its evaluation sets.

    Example: `scalars({"kind": "step", "loss": 0.5, "ids": [1], "tasks": {"maths": {"x": 2}}})` is
    `{"loss": 0.5, "tasks/maths/x": 2.0}`.
    """
    shown = ((name, value) for name, value in row.items() if name not in NOT_SHOWN)
    values = {name: float(value) for name, value in shown if isinstance(value, int | float)}
    for key in ("tasks", "sets"):
        for part, inner in (row.get(key) or {}).items():
            values |= {f"{key}/{part}/{name}": value for name, value in scalars(inner).items()}
    return values


def histograms(row: dict[str, Any]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield name and bins `(integer x, count)` of the mappings of integers, without gaps.

    Example: of `{"ages": {"1": 5, "3": 2}}` it yields `("ages", [(1, 5), (2, 0), (3, 2)])`.
    """
    for name, value in row.items():
        if isinstance(value, dict) and value:
            with suppress(TypeError, ValueError):
                counts = {int(x): float(n) for x, n in value.items()}
                xs = range(min(counts), max(counts) + 1)
                yield name, [(float(x), counts.get(x, 0.0)) for x in xs]


class TensorBoardMirror:
    """Event files in `<output_dir>/tensorboard`, by TensorBoard's own writer.

    Each start of a run writes a new file that begins with TensorBoard's session marker, which hides
    older points from `first_step` on: the chart shows one curve, as metrics.jsonl does.

    Raises:
        MirrorError: tensorboard is not installed.
    """

    def __init__(self, output_dir: str | Path, first_step: int = 0) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as e:
            raise MirrorError.not_installed("tensorboard", "false") from e
        self._events, self._summaries, self._text = event_pb2, summary_pb2, text_pb
        self._writer = EventFileWriter(str(Path(output_dir, "tensorboard")), flush_secs=10)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(first_step, time.time(), session_log=start)

    def log(self, row: dict[str, Any]) -> None:
        """Copy the row of a step or an evaluation; other kinds are left out."""
        if (prefix := PREFIX.get(row["kind"])) is None:
            return
        value = self._summaries.Summary.Value
        values = [value(tag=f"{prefix}/{k}", simple_value=x) for k, x in scalars(row).items()]
        for name, bins in histograms(row):
            num, total, squares = (sum(x**power * n for x, n in bins) for power in range(3))
            histo = self._summaries.HistogramProto(
                min=bins[0][0], max=bins[-1][0], num=num, sum=total, sum_squares=squares,
                bucket_limit=[x + 0.5 for x, _ in bins], bucket=[n for _, n in bins],
            )  # fmt: skip
            values.append(value(tag=f"{prefix}/{name}", histo=histo))
        when = row.get("unix_seconds") or time.time()
        self._add(row["step"], when, summary=self._summaries.Summary(value=values))

    def samples(self, rows: Sequence[dict[str, Any]]) -> None:
        """Copy completions as the texts `samples/right` and `samples/wrong`."""
        for row in rows:
            lines = (line for name in SAMPLE for line in f"{name}: {row[name]}".splitlines())
            # The page reads Markdown; what is indented is code, so no text is markup.
            text = "\n".join(f"    {line}" for line in lines)
            kind = "right" if row["verdict"] == "correct" else "wrong"
            self._add(row["step"], time.time(), summary=self._text(f"samples/{kind}", text))

    def _add(self, step: int, when: float, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=when, step=step, **content))

    def close(self) -> None:
        """Write queued events and close the file."""
        self._writer.close()


class WandbMirror:
    """One wandb run; nothing else writes to it.

    The step metrics are `train/step` and `eval/step`: evaluations may come late, and a resumed run
    continues its charts. wandb's own step counter would drop rows of a step that it has committed.

    wandb's files go to `<output_dir>/wandb`, its run id to `<output_dir>/wandb_run_id.txt`. Mode
    `offline` only writes files (`wandb sync` uploads them later); with a `first_step` above 0 the
    run of the id file continues; `config` is shown with the run.

    Raises:
        MirrorError: wandb is not installed, or did not start.
    """

    def __init__(
        self, output_dir: str | Path, *, mode: str, first_step: int = 0, config: Any = None
    ) -> None:
        try:
            import wandb
        except ImportError as e:
            raise MirrorError.not_installed("wandb", "off") from e
        self._wandb, folder = wandb, Path(output_dir)
        self._samples: deque[list[Any]] = deque(maxlen=TABLE_ROWS)
        id_file = folder / "wandb_run_id.txt"
        run_id = id_file.read_text().strip() if first_step and id_file.exists() else None
        # An offline run cannot ask the server; `wandb sync` joins runs by their id.
        resume = "allow" if run_id and mode == "online" else None
        start: dict[str, Any] = {"id": run_id, "resume": resume, "mode": mode, "dir": str(folder)}
        start |= {"project": "megatron_rl", "name": folder.name}
        waits = {"init_timeout": 90, "finish_timeout": 60}  # seconds
        settings = wandb.Settings(**waits, console="off", silent=True)
        try:
            self._run = wandb.init(**start, config=config, settings=settings)
        except wandb.Error as e:
            raise MirrorError(f"metrics.wandb is {mode} and wandb did not start: {e}") from e
        id_file.write_text(self._run.id)
        wandb.Table(columns=list(SAMPLE), data=[])  # imports pandas, for a second: not in the run
        for prefix in set(PREFIX.values()):
            self._run.define_metric(f"{prefix}/step")
            self._run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")

    def log(self, row: dict[str, Any]) -> None:
        """Copy the row of a step or an evaluation; other kinds are left out."""
        if (prefix := PREFIX.get(row["kind"])) is None:
            return
        values: dict[str, Any] = {f"{prefix}/{k}": v for k, v in scalars(row).items()}
        for name, bins in histograms(row):
            edges = [bins[0][0] - 0.5, *(x + 0.5 for x, _ in bins)]
            counts = [count for _, count in bins]
            values[f"{prefix}/{name}"] = self._wandb.Histogram(np_histogram=(counts, edges))
        self._run.log(values | {f"{prefix}/step": row["step"]})

    def samples(self, rows: Sequence[dict[str, Any]]) -> None:
        """Copy completions into the table `train/samples`, which has the last `TABLE_ROWS`."""
        self._samples.extend([row[name] for name in SAMPLE] for row in rows)
        table = self._wandb.Table(columns=list(SAMPLE), data=list(self._samples))
        self._run.log({"train/samples": table, "train/step": rows[-1]["step"]})

    def close(self) -> None:
        """End the wandb run and wandb's service; wait at most a minute for uploads.

        `finish` returns before the service has written its file (wandb 0.31); a container that ends
        with its main process would lose the last rows.
        """
        self._run.finish()
        self._wandb.teardown()


class RunSink:
    """Writes each row to all outputs of a configuration; it closes `writer` with itself.

    A run that is resumed starts at `first_step`. A mirror that fails is left out from then on, with
    a warning.

    Raises:
        MirrorError: a configured mirror is not installed, or did not start.
    """

    def __init__(self, config: RunConfig, writer: MetricsWriter, first_step: int = 0) -> None:
        self.writer, folder = writer, config.output_dir
        self.mirrors: list[Any] = []
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

    def _mirror(self, act: Callable[[Any], None]) -> None:
        for mirror in list(self.mirrors):
            try:
                act(mirror)
            except Exception as e:  # noqa: BLE001 - none is worth the run
                self.mirrors.remove(mirror)
                name, problem = type(mirror).__name__, f"{type(e).__name__}: {e}"
                rest = "it gets nothing more; metrics.jsonl and the rollout files have all of it"
                print(f"warning: {name} failed ({problem}): {rest}", file=sys.stderr)
