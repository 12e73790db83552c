"""A hook that Megatron's training loop lacks: before the schedule of a training step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any


def before_training_schedules(begin: Callable[[int, Sequence[Any]], None]) -> None:
    """Have `megatron.training` call a function on every rank before each training schedule.

    Within a schedule, pipeline stages reach the script's functions at different times: nothing
    collective may happen there. Evaluation runs without the call. `begin` gets the number of
    iterations that are done, and the model chunks as they are wrapped.
    """
    from megatron.training import get_args, training

    schedule_of = training.get_forward_backward_func

    def run(schedule: Callable[..., Any], **options: Any) -> Any:
        if not options["forward_only"]:
            begin(get_args().curr_iteration, options["model"])
        return schedule(**options)

    training.get_forward_backward_func = lambda *args, **kwargs: functools.partial(
        run, schedule_of(*args, **kwargs)
    )
