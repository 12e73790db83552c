"""`megatron-rl fit`, `compare` and `forecast`.

Exit codes: 0 well, 2 bad input or options, 3 ill-conditioned under --strict.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from .errors import MissingExtra, PointsError
from .options import FitOptions, ReadOptions

if TYPE_CHECKING:
    from .fit_result import Fit
    from .paper_points import PaperRun

Command = Callable[..., dict[str, Any]]
BAD_INPUT, ILL_CONDITIONED = 2, 3

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

FORMATS = "metrics.jsonl, CSV, JSONL, Parquet, TensorBoard files, offline wandb; run directories"
Files = Annotated[list[Path], typer.Argument(help=FORMATS)]
Json = Annotated[Path | None, typer.Option("--json", help="Write JSON here ('-': standard output)")]
Overlay = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Draw these published points as well, for example scalerl"),
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with code 3 if ill-conditioned")]


def _fits_command(name: str, *without: str) -> Callable[[Command], Callable[..., None]]:
    """Add a command that reads files and fits them, from a function of the fits.

    The command has the fields of ReadOptions and FitOptions but `without`, the function's
    keyword-only arguments, `--json` and `--strict`. The function gets the fits and a console, which
    is quiet if standard output belongs to JSON, and returns the object for JSON.
    """

    def decorate(function: Command) -> Callable[..., None]:
        @wraps(function, assigned=("__name__", "__doc__"))
        def command(
            *, files: Files, json_path: Json = None, strict: Strict = False, **given: Any
        ) -> None:
            from rich.console import Console

            reading = {f.name: given.pop(f.name) for f in fields(ReadOptions)}
            fitting = {f.name: given.pop(f.name) for f in fields(FitOptions) if f.name in given}
            try:
                fitting["r0"] = _number_or("--r0", "fit", fitting["r0"])
                fits, failed = _read_and_fit(files, ReadOptions(**reading), FitOptions(**fitting))
                quiet = str(json_path) == "-"
                data = function(fits, Console(highlight=False, quiet=quiet), **given)
                text = json.dumps(data, indent=2, allow_nan=False)
                if quiet:
                    typer.echo(text)
                elif json_path is not None:
                    json_path.write_text(text + "\n", encoding="utf-8")
            except (MissingExtra, ValueError, OSError) as error:
                typer.secho(f"error: {error}", fg="red", err=True)
                raise typer.Exit(BAD_INPUT) from error
            if failed:
                raise typer.Exit(BAD_INPUT)
            if strict and (ill := [f.name for f in fits if not f.well_conditioned]):
                typer.secho(f"ill-conditioned: {', '.join(ill)}", fg="red", err=True)
                raise typer.Exit(ILL_CONDITIONED)

        # Typer reads the arguments of a command from its signature and annotations.
        options = [*_parameters(ReadOptions), *_parameters(FitOptions)]
        parameters = [p for p in options if p.name not in without]
        for f in (function, command):
            own = inspect.signature(f, follow_wrapped=False).parameters.values()
            parameters += [p for p in own if p.kind is p.KEYWORD_ONLY]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return app.command(name)(command)

    return decorate


def _parameters(options: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(options, include_extras=True)
    for f in fields(options):
        kind, text = get_args(hints[f.name])
        names = ["--percent/--fraction"] if f.name == "percent" else []
        if f.name == "r0":  # a number or a word: `_number_or`
            kind = str
        given: Any = {"annotation": Annotated[kind, typer.Option(*names, help=text)]}
        yield inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, **given)


def _overlay(console: Any, names: list[str] | None, unit: str) -> list["PaperRun"]:
    from .paper_points import published

    runs = [published(name, unit) for name in names or ()]
    for run in runs:
        console.print(f"published: {run}, GPU-hours")
    return runs


def _number_or(option: str, word: str, text: str) -> Any:
    try:
        return text if text == word else float(text)
    except ValueError:
        raise PointsError(f"{option} is '{text}'", f"Give a number, or '{word}'") from None


def _read_and_fit(
    files: list[Path], reading: ReadOptions, options: FitOptions
) -> tuple[list["Fit"], bool]:
    """Return the fits, and whether one failed: a run that has only begun hides no other run."""
    from .fitting import fit_series
    from .io import read_many

    fits, errors = [], []
    for series in read_many(files, reading):
        try:
            fits.append(fit_series(series, options))
        except ValueError as error:
            errors.append(f"series '{series.name}': {error}")
    if not fits:
        raise PointsError(errors[0] if errors else "no series", "Nothing could be fitted")
    for text in errors:
        typer.secho(f"error: {text}", fg="red", err=True)
    return fits, bool(errors)


@_fits_command("fit")
def fit_command(
    fits: list["Fit"],
    console: Any,
    *,
    plot: Annotated[Path | None, typer.Option(help="Draw .png, .svg or .pdf per series")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one interactive HTML file")] = None,
    published: Overlay = None,
) -> dict[str, Any]:
    """Fit pass rate against compute: A, B, Cmid with intervals, and predict the rest."""
    from . import report

    report.print_fits(console, fits)
    overlay = _overlay(console, published, fits[0].unit)
    if plot is not None:
        from .plot import save_plot

        for i, f in enumerate(fits):
            numbered = plot if len(fits) == 1 else plot.with_stem(f"{plot.stem}_{i + 1}")
            save_plot(f, numbered, overlay)
    if html is not None:
        from .plot import save_html

        save_html(fits, html, overlay)
    return report.one_or_several("fit", fits)


@_fits_command("compare", "fix_a", "run_margin")
def compare_command(
    fits: list["Fit"],
    console: Any,
    *,
    margin: Annotated[float, typer.Option(help="Differences of A up to this are none")] = 0.02,
    shared_a: Annotated[
        str | None, typer.Option(help="Refit all at this A, or at their 'mean'; rank by B")
    ] = None,
    published: Overlay = None,
    plot: Annotated[Path | None, typer.Option(help="Draw curves and transform")] = None,
) -> dict[str, Any]:
    """Rank runs by A, and by B where A agrees within the margin."""
    from . import report
    from .comparison import compare

    shared = None if shared_a is None else _number_or("--shared-a", "mean", shared_a)
    result = compare(fits, margin, shared)
    report.print_comparison(console, result)
    overlay = _overlay(console, published, result.entries[0].fit.unit)
    if plot is not None:
        from .plot import save_comparison

        save_comparison(result, plot, overlay)
    return report.comparison_to_dict(result)


@_fits_command("forecast", "fix_a", "method")
def forecast_command(
    fits: list["Fit"],
    console: Any,
    *,
    target: Annotated[list[float] | None, typer.Option(help="Pass rate; may be repeated")] = None,
    budget: Annotated[float | None, typer.Option(help="Total compute that may be spent")] = None,
) -> dict[str, Any]:
    """Forecast the gain of more compute: compute for a target, gain per unit, when to stop."""
    from . import report
    from .forecasting import forecast

    forecasts = [forecast(f, target or (), budget) for f in fits]
    for p in forecasts:
        report.print_forecast(console, p)
    return report.one_or_several("forecast", forecasts)
