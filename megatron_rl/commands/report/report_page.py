"""The page of `megatron-rl report`: its sections (body.html), and its charts for report.js."""

import itertools
import json
import time
from html import escape
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment
from markupsafe import Markup

from megatron_rl.commands.report.report_charts import CHARTS, charts_of, pass_rate_charts
from megatron_rl.commands.report.run_facts import (
    RunFacts,
    as_text,
    best_and_worst,
    defaults,
    slowest_prompts,
)
from megatron_rl.commands.view.page import fill
from megatron_rl.metrics.metrics_file import METRICS
from megatron_rl.metrics.run_report import report_lines
from megatron_rl.metrics.terminal import shortened, visible
from megatron_rl.scaling.plot import COLORS

_TEMPLATE, _BODY, _CODE = (
    (resources.files(__package__) / name).read_text(encoding="utf-8")
    for name in ("report.html", "body.html", "report.js")
)
MOST_EVENTS = 200
ABOUT_EVENTS = ("generator", "reason", "last_act", "completions_again", "completions_continued",
                "tokens_continued", "prompt_ids", "rows", "file")  # fmt: skip


def render(runs: list[RunFacts]) -> str:
    """Return the page of a run, or of several side by side."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    pass_rates = pass_rate_charts(runs)
    sections = {section: charts_of(section, runs) for section in CHARTS}
    charts = [chart for chart, _ in pass_rates if chart["lines"]]
    charts += itertools.chain(*sections.values())
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(str(value)),
    )
    environment.filters["shortened"] = shortened
    body = environment.from_string(_BODY).render(
        runs=runs,
        names=[run.name for run in runs],
        written=time.strftime("%F %H:%M UTC", time.gmtime()),
        pass_rates=pass_rates,
        summary=_summary(runs),
        sections=sections,
        differing=_differences(runs),
        parts=[(run, _faults(run) | _completions(run) | _configuration(run)) for run in runs],
        recovery=METRICS["recovery_seconds"].strip(),
        figure=lambda x: f"{int(x):,}" if x == int(x) else f"{x:,.4g}",
    )
    # The number of a run or metric is its color.
    light = "".join(f"--c{i}:{color};" for i, color in enumerate(COLORS))
    dark = "".join(f"--c{i}:color-mix(in srgb,{color} 62%,#fff);" for i, color in enumerate(COLORS))
    data = json.dumps({"charts": charts, "colors": len(COLORS)}, default=_numbers, allow_nan=False)
    values = {"BODY": body, "LIGHT": light, "DARK": dark, "TITLE": escape(visible(title))}
    return fill(_TEMPLATE, _CODE, HEAD=data.replace("<", "\\u003c"), **values)


def _numbers(array: Any) -> list[float | None]:
    """Return numbers with six digits: of more, a page of 2,000 steps is half as large again."""
    return [float(f"{x:.6g}") if np.isfinite(x) else None for x in array]


def _summary(runs: list[RunFacts]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of figures."""
    lines, head = [report_lines(run.summary) for run in runs], ["", *(run.name for run in runs)]
    if len(runs) == 1:
        return head, [[*line] for line in lines[0]]
    joined = [dict[str, str]() for _ in runs]
    for texts, each in zip(joined, lines, strict=True):
        for name, text in each:  # several notes have one name
            texts[name] = f"{texts[name]}; {text}" if name in texts else text
    names = dict.fromkeys(name for texts in joined for name in texts)
    return head, [[name, *(texts.get(name, "") for texts in joined)] for name in names]


def _faults(run: RunFacts) -> dict[str, Any]:
    events = [row for row in run.rows if row["kind"] == "event"]
    start = min((row["unix_seconds"] for row in run.rows if "unix_seconds" in row), default=0.0)
    resumed = [row for row in events if row["event"] == "resumed"]
    # The last resumption may have no step yet.
    seconds = run.summary["availability"]["trainer_recoveries"]
    again = dict(zip(map(id, resumed), seconds, strict=False))
    rows = []
    for row in events[-MOST_EVENTS:]:
        about = [f"{n} {row[n]}" for n in ABOUT_EVENTS if row.get(n) not in (None, 0, "")]
        recovery = row.get("recovery_seconds", again.get(id(row)))
        after = row["unix_seconds"] - start if "unix_seconds" in row else None
        rows.append([after, row.get("step"), row["event"], recovery, "; ".join(about)])
    note = f"The newest {MOST_EVENTS} of {len(events)}." if len(events) > MOST_EVENTS else ""
    return {"events": rows, "of_events": note}


def _completions(run: RunFacts) -> dict[str, Any]:
    prompts, of_slow = slowest_prompts(run)
    names = ("seconds_mean", "seconds_max", "seconds_count", "reward_mean")
    slow = [
        [r["task"], str(r["prompt_id"]), *(r[n] for n in names), shortened(r["prompt_min"], 300)]
        for r in prompts
    ]
    shown, of_shown = best_and_worst(run)
    return {"slow": slow, "of_slow": of_slow, "shown": shown, "of_shown": of_shown}


def _configuration(run: RunFacts) -> dict[str, Any]:
    """Return all keys with value, default and meaning, those that differ, and their places."""
    known = defaults(run.config)
    unknown = "unknown key", ""
    keys = [(key, as_text(value), *known.get(key, unknown)) for key, value in run.config.items()]
    marked = [i for i, (_, value, default, _) in enumerate(keys) if value != default]
    return {"every": keys, "changed": [keys[i] for i in marked], "marked": marked}


def _differences(runs: list[RunFacts]) -> list[list[str]]:
    """Return the keys, and the versions of packages, that differ, with the values of the runs."""
    configs = [{key: as_text(value) for key, value in run.config.items()} for run in runs]
    versions = [run.summary["versions"] for run in runs]
    rows = []
    for prefix, each, absent in (("", configs, "(none)"), ("version of ", versions, "not known")):
        for key in dict.fromkeys(itertools.chain(*each)):
            values = [known.get(key, absent) for known in each]
            if len({*values}) > 1:
                rows.append([prefix + key, *values])
    return rows
