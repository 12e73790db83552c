"""`megatron-rl fit`, `compare` and `forecast`.

Exit codes: 0 well, 2 bad input or options, 3 ill-conditioned under --strict.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from .fitting import Fit
    from .window import R0Choice

BAD_INPUT = 2
ILL_CONDITIONED = 3

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Files = Annotated[
    list[Path],
    typer.Argument(
        help="metrics.jsonl, CSV, JSONL, Parquet, TensorBoard event files or run directories, "
        "wandb offline runs or exported CSV"
    ),
]
SeriesNames = Annotated[
    list[str] | None, typer.Option("--series", help="Keep this series; may be repeated")
]
SeriesColumn = Annotated[str | None, typer.Option(help="Column that names the series")]
ComputeColumn = Annotated[str | None, typer.Option(help="Column of compute")]
ComputeUnit = Annotated[
    str | None,
    typer.Option(
        help="Unit to report: gpu-hours, gpu-seconds (converted into each other), flops, tokens, "
        "steps or any label"
    ),
]
RewardColumn = Annotated[
    list[str] | None,
    typer.Option(help="Column of the pass rate; repeated: one series per column"),
]
StderrColumn = Annotated[str | None, typer.Option(help="Column of the standard error")]
Percent = Annotated[
    bool | None, typer.Option("--percent/--fraction", help="Rewards are percent; default: detect")
]
R0 = Annotated[str, typer.Option(help="Reward at zero compute: a number, 'first' or 'fit'")]
Skip = Annotated[
    float | None,
    typer.Option(
        help="Leave out points up to this compute; default: a start that contradicts the rest"
    ),
]
FitUntil = Annotated[float | None, typer.Option(help="Fit up to this compute and predict the rest")]
Form = Annotated[
    Literal["log-sigmoid", "linear-sigmoid", "power-law"], typer.Option(help="Family of curves")
]
Method = Annotated[Literal["fast", "paper"], typer.Option(help="'paper': its grid, slow")]
FixA = Annotated[float | None, typer.Option("--fix-a", help="Hold A at this value")]
AMax = Annotated[float, typer.Option("--a-max", help="Upper bound of A")]
Level = Annotated[float, typer.Option(help="Confidence level of intervals and band")]
RunMargin = Annotated[
    float, typer.Option(help="Run-to-run spread of A, added to its interval in quadrature")
]
Correlated = Annotated[
    float,
    typer.Option(help="Prior probability that neighbouring evaluations have correlated noise"),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write JSON here ('-': standard output)")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with code 3 if ill-conditioned")]


def _read_and_fit(
    files: Files,
    series: SeriesNames = None,
    series_column: SeriesColumn = None,
    compute_column: ComputeColumn = None,
    compute_unit: ComputeUnit = None,
    reward_column: RewardColumn = None,
    stderr_column: StderrColumn = None,
    percent: Percent = None,
    r0: R0 = "first",
    skip: Skip = None,
    fit_until: FitUntil = None,
    form: Form = "log-sigmoid",
    method: Method = "fast",
    fix_a: FixA = None,
    a_max: AMax = 1.0,
    level: Level = 0.95,
    run_margin: RunMargin = 0.0,
    correlated: Correlated = 0.5,
) -> tuple[list["Fit"], bool]:
    """Read the files and fit every series; whether some could not be fitted, which is said at once.

    A run that has only begun does not keep the others from being shown; the exit code is still 2.
    """
    from .errors import DataError
    from .fitting import fit
    from .io import ReadOptions, read_many

    options = ReadOptions(
        series=tuple(series or ()),
        series_column=series_column,
        compute_column=compute_column,
        reward_columns=tuple(reward_column or ()),
        stderr_column=stderr_column,
        percent=percent,
        compute_unit=compute_unit,
    )
    fits, errors = [], []
    start = _r0(r0)
    for s in read_many(files, options):
        try:
            made = fit(
                s,
                r0=start,
                skip=skip,
                fit_until=fit_until,
                form=form,
                method=method,
                fix_a=fix_a,
                a_max=a_max,
                level=level,
                run_margin=run_margin,
                correlated=correlated,
            )
        except ValueError as error:
            errors.append(f"series '{s.name}': {error}")
        else:
            fits.append(made)
    if not fits:
        raise DataError(errors[0] if errors else "no series", "Nothing could be fitted")
    for text in errors:
        typer.secho(f"error: {text}", fg="red", err=True)
    return fits, bool(errors)


@dataclass(frozen=True)
class Output:
    """Where a command's result goes: text to the terminal, and JSON."""

    json_path: Path | None

    @property
    def prints(self) -> bool:
        """Whether standard output is free for text."""
        return str(self.json_path) != "-"

    def write(self, data: dict[str, Any]) -> None:
        """The JSON, if it was asked for."""
        if self.json_path is None:
            return
        text = json.dumps(data, indent=2, allow_nan=False)
        if self.prints:
            self.json_path.write_text(text + "\n", encoding="utf-8")
        else:
            typer.echo(text)


def _of_fits(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that reads files and fits them, from a function of the fits.

    The command has the options of `_read_and_fit` but `without`, the function's keyword-only ones,
    `--json` and `--strict`. The function gets the fits and where its output goes. Errors of the
    input become one line on standard error and exit code 2.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        fitting = {
            name: parameter
            for name, parameter in inspect.signature(_read_and_fit).parameters.items()
            if name not in without
        }

        @wraps(function, assigned=("__name__", "__doc__"))
        def command(*, json_path: Json = None, strict: Strict = False, **given: Any) -> None:
            from .errors import DataError, MissingExtra

            chosen = {name: given.pop(name) for name in fitting}
            try:
                fits, failed = _read_and_fit(**chosen)
                function(fits, Output(json_path), **given)
            except (DataError, MissingExtra, ValueError, OSError) as error:
                typer.secho(f"error: {error}", fg="red", err=True)
                raise typer.Exit(BAD_INPUT) from error
            _finish(strict, fits, failed)

        # Typer reads what a command takes from these two.
        parameters = [
            *(p.replace(kind=p.KEYWORD_ONLY) for p in fitting.values()),
            *_keywords(function),
            *_keywords(command),
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _keywords(function: Callable[..., None]) -> list[inspect.Parameter]:
    own = inspect.signature(function, follow_wrapped=False).parameters.values()
    return [p for p in own if p.kind is p.KEYWORD_ONLY]


@app.command("fit")
@_of_fits()
def fit_command(
    fits: list["Fit"],
    output: Output,
    *,
    plot: Annotated[
        Path | None, typer.Option(help="Draw .png, .svg or .pdf; several series: numbered")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one interactive HTML file")] = None,
    bootstrap: Annotated[
        int, typer.Option(help="Resamples of a moving-block bootstrap, as a check; 0: none")
    ] = 0,
) -> None:
    """Fit pass rate against compute: A, B, Cmid with intervals, and predict the rest."""
    from . import report

    resampled = [f.bootstrap(bootstrap) for f in fits] if bootstrap else None
    if output.prints:
        report.print_fits(fits)
        if resampled is not None:
            report.print_bootstrap(fits, resampled, bootstrap)
    output.write(report.fits_to_dict(fits, resampled))
    if plot is not None:
        from .plot import save_plot

        for i, f in enumerate(fits):
            numbered = plot if len(fits) == 1 else plot.with_stem(f"{plot.stem}_{i + 1}")
            save_plot(f, numbered)
    if html is not None:
        from .html import save_html

        save_html(fits, html)


@app.command("compare")
@_of_fits("fix_a", "run_margin")
def compare_command(
    fits: list["Fit"],
    output: Output,
    *,
    margin: Annotated[float, typer.Option(help="Differences of A up to this are none")] = 0.02,
    shared_a: Annotated[
        float | None, typer.Option("--shared-a", help="Refit all at this A and rank by B")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw curves and leave-one-out transform")
    ] = None,
) -> None:
    """Rank runs by A, and by B where A agrees within the margin."""
    from . import report
    from .comparison import compare

    result = compare(fits, margin, shared_a)
    if output.prints:
        report.print_comparison(result)
    output.write(report.comparison_to_dict(result))
    if plot is not None:
        from .plot import save_comparison

        save_comparison(result, plot)


@app.command("forecast")
@_of_fits("fix_a", "method")
def forecast_command(
    fits: list["Fit"],
    output: Output,
    *,
    target: Annotated[
        list[float] | None, typer.Option(help="Pass rate to reach (fraction); may be repeated")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Total compute that may be spent")] = None,
) -> None:
    """Say what more compute buys: compute for a target, gain per unit, and when to stop."""
    from . import report
    from .forecasting import forecast

    forecasts = [forecast(f, tuple(target or ()), budget) for f in fits]
    if output.prints:
        for p in forecasts:
            report.print_forecast(p)
    made = [report.forecast_to_dict(p) for p in forecasts]
    together = {"schema": "megatron_rl.forecasts/1", "forecasts": made}
    output.write(made[0] if len(made) == 1 else together)


def _r0(text: str) -> "R0Choice":
    from .errors import DataError

    if text == "first" or text == "fit":
        return "first" if text == "first" else "fit"
    try:
        return float(text)
    except ValueError:
        raise DataError(f"--r0 is '{text}'", "Give a number, 'first' or 'fit'") from None


def _finish(strict: bool, fits: list["Fit"], failed: bool) -> None:
    """Exit code of a command whose output is complete."""
    if failed:
        raise typer.Exit(BAD_INPUT)
    ill = [f.name for f in fits if not f.well_conditioned]
    if strict and ill:
        typer.secho(f"ill-conditioned: {', '.join(ill)}", fg="red", err=True)
        raise typer.Exit(ILL_CONDITIONED)
