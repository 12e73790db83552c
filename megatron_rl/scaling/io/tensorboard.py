"""TensorBoard event files: scalar tags become columns, aligned by step.

A compute tag (for example ``eval/compute_device_hours``) that was logged at the evaluation's step
is used by name; without one the step is the compute.
"""

from pathlib import Path

from ..errors import DataError, MissingExtra
from .table import Table


def read(path: Path) -> Table:
    """Read the scalars of an event file, or of all event files of a run's directory."""
    try:
        from tensorboard.backend.event_processing import event_accumulator
        from tensorboard.util import tensor_util
    except ImportError as error:
        raise MissingExtra("tensorboard", f"Reading {path}", "io") from error
    everything = {event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}
    events = event_accumulator.EventAccumulator(str(path), size_guidance=everything)
    events.Reload()
    tags = events.Tags()
    by_tag: dict[str, dict[int, object]] = {}
    for tag in tags[event_accumulator.SCALARS]:
        by_tag[tag] = {e.step: float(e.value) for e in events.Scalars(tag)}
    for tag in tags[event_accumulator.TENSORS]:
        values = [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
        if values and all(v.size == 1 and v.dtype.kind in "fiu" for _, v in values):
            by_tag[tag] = {step: float(v.reshape(())) for step, v in values}
    if not by_tag:
        raise DataError(
            "no scalars in the event files", "Name a run's own directory", file=str(path)
        )
    steps = sorted({step for column in by_tag.values() for step in column})
    columns: dict[str, list[object]] = {
        tag: [column.get(step) for step in steps] for tag, column in by_tag.items()
    }
    columns.setdefault("step", list(steps))
    name = path.name if path.is_dir() else path.parent.name
    return Table(str(path), name, columns, list(range(1, len(steps) + 1)))
