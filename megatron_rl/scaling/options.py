"""Options of reading and fitting; the annotations are the help texts of the command line."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from .errors import PointsError

FormName = Literal["log-sigmoid", "linear-sigmoid", "power-law"]
FORMS: tuple[FormName, ...] = get_args(FormName)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Columns and series to read; by default the columns have well-known names."""

    series: Annotated[list[str] | None, "Keep this series; may be repeated"] = None
    series_column: Annotated[str | None, "Column that names the series"] = None
    compute_column: Annotated[str | None, "Column of compute"] = None
    compute_unit: Annotated[
        str | None,
        "Unit to report: gpu-hours, gpu-seconds (converted into each other), flops, tokens, "
        "steps or any label",
    ] = None
    devices: Annotated[float | None, "Compute is wall-clock time of so many GPUs: multiply"] = None
    reward_column: Annotated[
        list[str] | None, "Column of the pass rate; repeated: a series each"
    ] = None
    stderr_column: Annotated[str | None, "Column of the standard error"] = None
    percent: Annotated[bool | None, "Rewards are percent; default: detect"] = None


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Options of a fit."""

    r0: Annotated[float | Literal["fit"], "Reward at zero compute: a number, or 'fit'"] = "fit"
    skip: Annotated[
        float | None, "Leave out points up to this compute; default: a start off the curve"
    ] = None
    skip_epochs: Annotated[
        float | None, "Leave out the first passes over the prompts (metrics.jsonl knows them)"
    ] = None
    fit_until: Annotated[float | None, "Fit up to this compute and predict the rest"] = None
    form: Annotated[FormName, "Family of curves"] = "log-sigmoid"
    method: Annotated[Literal["fast", "paper"], "'paper': the slow grid of the paper"] = "fast"
    a_range: Annotated[tuple[float, float], "Range of A in the paper's grid"] = (0.45, 0.8)
    cmid_range: Annotated[
        tuple[float, float] | None, "Range of Cmid in it; default: 1.5% to 150% of the last compute"
    ] = None
    fix_a: Annotated[float | None, "Hold A at this value"] = None
    a_max: Annotated[float, "Upper bound of A"] = 1.0
    level: Annotated[float, "Confidence level of intervals and band, 0.5 to 0.999"] = 0.95
    run_margin: Annotated[float, "Run-to-run spread of A, added to its interval"] = 0.0
    # Intervals then hold under both kinds of noise (benchmarks/results/scaling_defaults.md).
    correlated: Annotated[float, "Prior probability of correlated noise"] = 0.7

    def __post_init__(self) -> None:
        r0, a, a_max = self.r0, self.fix_a, self.a_max
        if not (r0 == "fit" if isinstance(r0, str) else 0 <= r0 < 1):
            raise PointsError(f"R0 is {r0!r}", "Give a pass rate in [0, 1), or 'fit'")
        if self.form not in FORMS:
            raise PointsError(f"unknown form {self.form!r}", f"Choose one of {', '.join(FORMS)}")
        if self.method not in ("fast", "paper"):
            raise PointsError(f"unknown method {self.method!r}", "Choose 'fast' or 'paper'")
        if not 0 < a_max <= 1 or (a is not None and not 0 < a <= a_max):
            raise PointsError(f"a_max is {a_max:g}, fix_a is {a}", "Give 0 < fix_a <= a_max <= 1")
        for low, high in (self.a_range, self.cmid_range or (1.0, 2.0)):
            if not 0 < low < high:
                raise PointsError(f"the grid's range is {low:g} to {high:g}", "Give 0 < low < high")
        if self.skip is not None and self.skip_epochs is not None:
            raise PointsError("both skip and skip_epochs are given", "Give one of them")
        if not 0.5 <= self.level <= 0.999:
            raise PointsError(f"level is {self.level:g}", "Give a level from 0.5 to 0.999")
        if not 0 <= self.correlated <= 1:
            raise PointsError(f"correlated is {self.correlated:g}", "Give a probability")
