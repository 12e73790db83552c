"""The report at the end of a run: summary.json, fit.png, and a table on the terminal.

For the schema of summary.json, `megatron_rl.summary/1`, see docs/metrics.md.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.files import replace_file
from megatron_rl.metrics.curves import UNITS, fit_parts
from megatron_rl.metrics.metrics_file import Row, last_rows, mean, read_metrics

if TYPE_CHECKING:
    from megatron_rl.scaling import Fit

SCHEMA = "megatron_rl.summary/1"
PAGES_SECONDS = 300.0
PARTS = ("tasks", "sets")  # keys of rows whose entries have curves of their own


def write_report(output_dir: str | Path, metrics_path: str | Path, **about: Any) -> dict[str, Any]:
    """Read metrics.jsonl, fit, write summary.json and pictures of the fits; return the summary.

    The pictures are fit.png, and fit_tasks.png for several tasks and fit_sets.png for evaluation
    sets. `about` are the keywords of `summarize`.

    Raises:
        MetricsError: metrics_path is not a readable file of metrics.
    """
    (output_dir := Path(output_dir)).mkdir(parents=True, exist_ok=True)
    summary, curves = summarize(read_metrics(metrics_path), metrics_path, **about)
    if any(curves.values()):
        from megatron_rl.scaling.plot import save_panels, save_plot

        for key, fits in curves.items():
            if fits and key == "fit":
                save_plot(fits[""], output_dir / "fit.png")
            elif fits:
                save_panels([*fits.values()], output_dir / f"fit_{key}.png")
    replace_file(output_dir / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return summary


def summarize(
    rows: list[Row],
    metrics_path: str | Path,
    *,
    fit_compute: str,
    phases: dict[str, float] | None = None,
    versions: dict[str, str] | None = None,
    extra: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, dict[str, "Fit"]]]:
    """Return the summary of rows of metrics.jsonl, and its fits.

    If the fit fails or has too few evaluations, the summary says so, without an exception. The fits
    are by `fit` (under the name ""), `tasks` and `sets`, and there by name.

    Args:
        rows: of metrics.jsonl.
        metrics_path: its path, for the summary.
        fit_compute: a value of `fit.compute`.
        phases: wall seconds by phase.
        versions: of the trainer's packages.
        extra: further values, `run` of the summary.
    """
    steps, evaluations = last_rows(rows, "step"), last_rows(rows, "eval")
    batches = [*steps, *(row for row in rows if row.get("event") == "empty_batch")]
    last = max(steps + evaluations, key=lambda row: row.get("compute_tokens") or 0, default={})
    parts = {key: fit_parts(rows, key, fit_compute) for key in ("fit", *PARTS)}
    summary = {
        "schema": SCHEMA,
        "metrics": str(metrics_path),
        "steps": steps[-1]["step"] + 1 if steps else 0,
        "tokens": _total(batches, "tokens"),
        "completions": _total(batches, "completions"),
        "compute": {name: last.get(f"compute_{name}") for name in UNITS if name != "steps"},
        **parts["fit"][0][""],
        **{key: parts[key][0] for key in PARTS},
        "multi_version_fraction": mean(steps, "multi_version_fraction", "completions"),
        "multi_version_fraction_long": mean(
            steps, "multi_version_fraction_long", "completions_long"
        ),
        "lag_max": max(_values(steps, "lag_max"), default=None),
        "completions_truncated": _total(batches, "completions_truncated"),
        "alarms": _alarms(sorted(batches, key=lambda row: row["step"])),
        "empty_batches": _total(steps, "empty_batches"),
        "availability": availability(rows),
        "aborted_requests": max(_values(steps, "aborted_requests"), default=None),
        "logprob_error": {
            "max": max(_values(rows, "logprob_error_max"), default=None),
            "mean": mean(rows, "logprob_error_mean", "logprob_error_tokens"),
            "tokens": _total(rows, "logprob_error_tokens"),
        },
        "wall_seconds": {**(phases or {}), "total": sum((phases or {}).values())},
        "versions": versions or {},
        "run": extra or {},
    }
    return summary, {key: curves for key, (_, curves) in parts.items()}


def availability(rows: list[Row]) -> dict[str, Any]:
    """Return shares of time and recoveries by name; values that were not measured are None.

    `trainer_busy` is the share of the time of all steps in which the trainer trained,
    `generators_busy` that of generators with a request to decode. A recovery of a generator is the
    time until it had work again, one of the trainer that from the last row before to the first step
    after, in seconds.
    """
    steps = [row for row in rows if row["kind"] == "step"]
    events = [row for row in rows if row["kind"] == "event"]
    lost = [row for row in events if row["event"] == "generator_lost"]
    waiting = mean(steps, "generator_wait_fraction", "step_seconds")
    names = {row["generator"] for row in lost}
    ready = [row for row in events if row["event"] == "generator_ready"]
    back = [row["recovery_seconds"] for row in ready if row["generator"] in names]
    again = ("completions_again", "completions_continued", "tokens_continued")
    return {
        "trainer_busy": mean(steps, "trainer_busy_fraction", "step_seconds"),
        "generators_busy": None if waiting is None else 1 - waiting,
        "generators_lost": len(lost),
        "generator_recoveries": back[-len(lost) :] if lost else [],
        **{name: sum(row[name] for row in lost) for name in again},
        "prompts_failed": sum(row["event"] == "prompt_failed" for row in events),
        "trainer_recoveries": _trainer_recoveries(rows),
    }


def _trainer_recoveries(rows: list[Row]) -> list[float]:
    recoveries = []
    for i, row in enumerate(rows):
        if row.get("event") != "resumed":
            continue
        before = [r["unix_seconds"] for r in rows[:i] if "unix_seconds" in r]
        last = max([*before, row.get("last_unix_seconds", 0.0)], default=0.0)
        after = next((r["unix_seconds"] for r in rows[i:] if r["kind"] == "step"), None)
        if last and after is not None:
            recoveries.append(after - last)
    return recoveries


def is_reported(folder: Path) -> bool:
    """Return True if the run has written its summary, and no row after it.

    A run that is resumed writes to metrics.jsonl before anything else.
    """
    summary, metrics = folder / "summary.json", folder / "metrics.jsonl"
    both = summary.exists() and metrics.exists()
    return both and summary.stat().st_mtime >= metrics.stat().st_mtime


def write_pages(folder: Path, seconds: float = PAGES_SECONDS) -> list[str]:
    """Have report.html and view.html written; return the lines for the terminal.

    The pages are made by a process of their own, within `seconds`: whatever becomes of it, the run
    has trained. A page that is not there has a line that begins with `no `, with the cause.
    """
    command = [sys.executable, "-m", "megatron_rl.cli", "report", str(folder), "--view"]
    try:
        done = subprocess.run(
            command, timeout=seconds, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return [f"no report.html: {e}"]
    lines = done.stdout.splitlines()
    if done.returncode:
        cause = (done.stderr.split("\n")[-2:] or [""])[0] or f"exit status {done.returncode}"
        lines.append(f"no report.html: {cause}")
    return lines


def report_lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table as (name, text)."""
    lines = [("steps, tokens", f"{summary['steps']}, {_text(summary['tokens'], '{:,.0f}')}")]
    if (rates := _rates(summary["pass_rate"])) is not None:
        lines.append(("held-out pass rate", rates))
        points = [p for p in summary["pass_rate"].values() if p.get("entropy") is not None]
        if points:
            shown = " → ".join(f"{p['entropy']:.3f} at step {p['step']}" for p in points)
            lines.append(("held-out entropy [nats/token]", shown))
    if "error" in (fit := summary["fit"]):
        lines.append(("fit", _task_fit(fit)))
    else:
        unit = UNITS.get(fit["compute"], fit["compute"])
        lines += [
            ("fit: A (pass rate at the end)", _interval(fit["A"])),
            ("fit: B (steepness)", _interval(fit["B"])),
            (f"fit: Cmid [{unit}]", _interval(fit["Cmid"])),
            *(("fit: note", warning) for warning in fit["warnings"]),
        ]
    for name, measured in (pair for key in PARTS for pair in summary[key].items()):
        lines.append((f"{name}: pass rate", _rates(measured["pass_rate"]) or "not measured"))
        lines.append((f"{name}: fit", _task_fit(measured["fit"])))
    error, seconds = summary["logprob_error"], summary["wall_seconds"]
    names = ("multi_version_fraction", "multi_version_fraction_long")
    share, share_long = (_text(summary[name], "{:.1%}") for name in names)
    largest, mean = (_text(error[name], "{:.1e}") for name in ("max", "mean"))
    tokens = _text(error["tokens"], "{:,.0f}")
    alarm = "{steps} steps, {first_step} to {last_step}: {message}"
    return [
        *lines,
        (
            "two or more weight versions",
            f"{share} of completions, {share_long} of those over 16 tokens",
        ),
        ("maximum lag [steps]", _text(summary["lag_max"], "{:.0f}")),
        ("truncated completions", _text(summary["completions_truncated"], "{:,.0f}")),
        *((f"alarm: {name}", alarm.format(**a)) for name, a in summary["alarms"].items()),
        *_availability_lines(summary["availability"]),
        ("aborted requests", _text(summary["aborted_requests"], "{:.0f}")),
        ("trainer - generator log-prob", f"max {largest}, mean {mean} over {tokens} tokens"),
        ("seconds", ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())),
    ]


def _rates(ends: dict[str, Any]) -> str | None:
    texts = []
    for p in filter(None, ends.values()):
        error = f" ± {p['stderr']:.3f}" if p["stderr"] else ""
        texts.append(f"{_text(p['value'], '{:.3f}')}{error} at step {p['step']}")
    return " → ".join(texts) or None


def _task_fit(fit: dict[str, Any]) -> str:
    if "error" in fit:
        return f"none, {fit['points']} evaluations: {fit['error']}"
    return ", ".join(f"{name} {_interval(fit[name])}" for name in ("A", "B", "Cmid"))


def _availability_lines(a: dict[str, Any]) -> list[tuple[str, str]]:
    busy = (_text(a[f"{role}_busy"], "{:.0%}") for role in ("trainer", "generators"))
    lines = [("busy: trainer, generators", ", ".join(busy))]
    generators, trainer = a["generator_recoveries"], a["trainer_recoveries"]
    for name, count, recoveries in (
        ("generators lost", a["generators_lost"], generators),
        ("trainer restarts", len(trainer), trainer),
    ):
        if count:
            shown = ", ".join(f"{seconds:.0f}" for seconds in recoveries) or "none"
            lines.append((name, f"{count}; seconds until work went on: {shown}"))
    return lines


def _alarms(steps: list[Row]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for row in steps:
        for name, message in row.get("alarms", {}).items():
            alarm = out.setdefault(name, {"first_step": row["step"], "steps": 0})
            alarm.update(last_step=row["step"], steps=alarm["steps"] + 1, message=message)
    return out


def _values(rows: list[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _total(rows: list[Row], name: str) -> float | None:
    return sum(values) if (values := _values(rows, name)) else None


def _text(value: float | None, form: str, missing: str = "not measured") -> str:
    return missing if value is None else form.format(value)


def _interval(parameter: dict[str, float | None]) -> str:
    low, high = (_text(parameter[end], "{:.3g}", missing="?") for end in ("low", "high"))
    return f"{_text(parameter['value'], '{:.3g}')}  [{low}, {high}]"
