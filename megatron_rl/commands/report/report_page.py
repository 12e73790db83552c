"""The page of `megatron-rl report`: tables and texts as HTML, charts as data for its script."""

import json
import time
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from megatron_rl.commands.report.report_charts import (
    CHARTS,
    Chart,
    charts_of,
    pass_rate_charts,
)
from megatron_rl.commands.report.run_facts import (
    RunFacts,
    as_text,
    best_and_worst,
    defaults,
    slowest_prompts,
)
from megatron_rl.commands.view.page import fill
from megatron_rl.metrics.names import METRICS
from megatron_rl.metrics.run_report import report_lines
from megatron_rl.metrics.terminal import shortened, visible

_TEMPLATE, _CODE = (
    (resources.files(__package__) / name).read_text(encoding="utf-8")
    for name in ("report.html", "report.js")
)
MOST_EVENTS = 200
PROMPT_CHARACTERS, COMPLETION_CHARACTERS = 300, 3000
ABOUT_EVENTS = ("generator", "reason", "last_act", "completions_again", "completions_continued",
                "tokens_continued", "prompt_ids", "rows", "file")  # fmt: skip


def render(runs: list[RunFacts]) -> str:
    """Return the page of a run, or of several side by side."""
    from megatron_rl.scaling.plot import COLORS

    charts = list[Chart]()
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = [_head(runs), _pass_rates(runs, charts), _figures(runs)]
    for section in CHARTS:
        body.append(
            _section(section, _add(charts, charts_of(section, runs), "No step has it yet."))
        )
    if len(runs) > 1:
        body.append(_section("Configurations", _differences(runs)))
    for run in runs:
        parts = "".join((_faults(run), _completions(run), _configuration(run)))
        if len(runs) > 1:
            parts = f"<details><summary>{_text(run.name)}</summary>{parts}</details>"
        body.append(parts)
    # The number of a run or metric is its color.
    light = "".join(f"--c{i}:{color};" for i, color in enumerate(COLORS))
    dark = "".join(f"--c{i}:color-mix(in srgb,{color} 62%,#fff);" for i, color in enumerate(COLORS))
    data = json.dumps({"charts": charts, "colors": len(COLORS)}, default=_numbers, allow_nan=False)
    values = {"BODY": "".join(body), "LIGHT": light, "DARK": dark, "TITLE": _text(title)}
    return fill(_TEMPLATE, _CODE, HEAD=data.replace("<", "\\u003c"), **values)


def _numbers(array: Any) -> list[float | None]:
    """Return numbers with six digits: of more, a page of 2,000 steps is half as large again."""
    return [float(f"{x:.6g}") if np.isfinite(x) else None for x in array]


def _text(value: Any) -> str:
    return escape(visible(str(value)))


def _section(title: str, content: str) -> str:
    return f'<section id="{_text(title)}"><h2>{_text(title)}</h2>{content}</section>'


def _note(text: str, kind: str = "note") -> str:
    return f'<p class="{kind}">{_text(text)}</p>'


def _table(head: list[str], rows: list[list[Any]], marked: set[int] | None = None) -> str:
    """Return a table in a box that scrolls; numbers are at the right."""

    def cell(value: Any) -> str:
        if isinstance(value, int | float):
            return f'<td class="number">{value:,.4g}</td>' if value != int(value) else (
                f'<td class="number">{int(value):,}</td>')  # fmt: skip
        return f"<td>{_text('' if value is None else value)}</td>"

    heads = "".join(f"<th>{_text(name)}</th>" for name in head)
    lines = (
        f"<tr{' class=marked' if i in (marked or ()) else ''}>{''.join(map(cell, row))}</tr>"
        for i, row in enumerate(rows)
    )
    kind = ' class="keyed"' if head[0] in ("", "key", "package") else ""
    return f'<div class="scroll"><table{kind}><tr>{heads}</tr>{"".join(lines)}</table></div>'


def _add(charts: list[Chart], new: list[Chart], nothing: str) -> str:
    """Add charts to the data of the page; return their places."""
    places = [f'<figure data-chart="{len(charts) + i}"></figure>' for i in range(len(new))]
    charts += new
    return f'<div class="charts">{"".join(places)}</div>' if new else _note(nothing)


def _head(runs: list[RunFacts]) -> str:
    written = time.strftime("%F %H:%M UTC", time.gmtime())
    lines = [_note(f"{run.folder}: {run.state}") for run in runs]
    for run in runs:
        where = f"{run.name}: " if len(runs) > 1 else ""
        lines += [_note(where + problem, "warning") for problem in run.problems]
        lines += [
            _note(f"{where}alarm {name}, {a['steps']} steps, {a['first_step']} to"
                  f" {a['last_step']}: {a['message']}", "warning")
            for name, a in run.summary["alarms"].items()
        ]  # fmt: skip
        if not run.summary["steps"]:
            lines.append(_note(f"{where}no step has been trained yet.", "warning"))
    return "".join([*lines, _note(f"Written {written}.")])


def _pass_rates(runs: list[RunFacts], charts: list[Chart]) -> str:
    out = []
    for chart, words in pass_rate_charts(runs):
        place = _add(charts, [chart], "") if chart["lines"] else ""
        head = "" if place else f"<h3>{_text(chart['title'])}</h3>"
        texts = "".join(f"<li>{_text(word)}</li>" for word in words)
        out.append(f'<div class="fit">{head}{place}<ul>{texts}</ul></div>')
    return _section("Pass rate", f'<div class="fits">{"".join(out)}</div>')


def _figures(runs: list[RunFacts]) -> str:
    lines = [report_lines(run.summary) for run in runs]
    if len(runs) == 1:
        return _section("Figures", _table(["", runs[0].name], [list(line) for line in lines[0]]))
    joined = [dict[str, str]() for _ in runs]
    for texts, each in zip(joined, lines, strict=True):
        for name, text in each:  # several notes have one name
            texts[name] = f"{texts[name]}; {text}" if name in texts else text
    names = dict.fromkeys(name for each in lines for name, _ in each)
    rows = [[name, *(each.get(name, "") for each in joined)] for name in names]
    return _section("Figures", _table(["", *(run.name for run in runs)], rows))


def _faults(run: RunFacts) -> str:
    events = [row for row in run.rows if row["kind"] == "event"]
    start = min((row["unix_seconds"] for row in run.rows if "unix_seconds" in row), default=0.0)
    resumed = [row for row in events if row["event"] == "resumed"]
    # The last resumption may have no step yet.
    seconds = run.summary["availability"]["trainer_recoveries"]
    again = dict(zip(map(id, resumed), seconds, strict=False))
    rows = []
    for row in events[-MOST_EVENTS:]:
        about = [
            f"{name} {row[name]}" for name in ABOUT_EVENTS if row.get(name) not in (None, 0, "")
        ]
        recovery = row.get("recovery_seconds", again.get(id(row)))
        after = row["unix_seconds"] - start if "unix_seconds" in row else None
        rows.append([after, row.get("step"), row["event"], recovery, "; ".join(about)])
    head = ["seconds since the start", "step", "event", "seconds to recover", "with"]
    note = f"The newest {MOST_EVENTS} of {len(events)}." if len(events) > MOST_EVENTS else ""
    table = _table(head, rows) if rows else _note("No generator or trainer was lost, or resumed.")
    meaning = METRICS["recovery_seconds"].strip()
    return _section("Faults and recoveries", _note(f"{note} Seconds to recover: {meaning}") + table)


def _completions(run: RunFacts) -> str:
    slow, which = slowest_prompts(run)
    out = [_note(which)]
    if slow:
        head = ["task", "prompt_id", "seconds, mean", "seconds, most", "completions", "reward",
                "prompt"]  # fmt: skip
        names = ("task", "prompt_id", "seconds_mean", "seconds_max", "seconds_count", "reward_mean")
        slow = [row | {"prompt_id": str(row["prompt_id"])} for row in slow]
        rows = [
            [*(r[n] for n in names), shortened(r["prompt_min"], PROMPT_CHARACTERS)] for r in slow
        ]
        out += [_note("Seconds from dispatch to verdict."), _table(head, rows)]
    content = _section("Slowest prompts", "".join(out))
    shown, which = best_and_worst(run)
    for title, chosen in shown.items():
        cards = []
        for row in chosen:
            parts = [f"step {row['step']}", row["task"], f"prompt {row['prompt_id']}",
                     row["verdict"], f"reward {row['reward']:+.3g}"]  # fmt: skip
            parts += [] if row["advantage"] is None else [f"advantage {row['advantage']:+.3g}"]
            texts = (
                f'<div class="text">{escape(shortened(row[name], most))}</div>'
                for name, most in (
                    ("prompt", PROMPT_CHARACTERS),
                    ("completion", COMPLETION_CHARACTERS),
                )
            )
            cards.append(f"<article>{_note(', '.join(parts))}{''.join(texts)}</article>")
        nothing = _note("No completion has a reward.")
        content += _section(title, _note(which) + ("".join(cards) or nothing))
    return content


def _configuration(run: RunFacts) -> str:
    known, rows = defaults(run.config), []
    for key, value in run.config.items():
        default, about = known.get(key, ("unknown key", ""))
        rows.append([key, as_text(value), default, about, as_text(value) != default])
    head = ["key", "value", "default", "meaning"]
    changed = [row[:-1] for row in rows if row[-1]]
    marked = {i for i, row in enumerate(rows) if row[-1]}
    every = _table(head, [row[:-1] for row in rows], marked)
    content = (
        f"{_note(f'{len(changed)} of {len(rows)} keys differ from the defaults:')}"
        f"{_table(head, changed)}<details><summary>All keys</summary>{every}</details>"
        if rows
        else _note("The configuration is not known.")
    )
    versions = [[name, text] for name, text in run.summary["versions"].items()]
    packages = _table(["package", "version"], versions) if versions else _note("Not known.")
    return _section("Configuration", content) + _section("Versions", packages)


def _differences(runs: list[RunFacts]) -> str:
    keys, rows = dict.fromkeys(key for run in runs for key in run.config), []
    for key in keys:
        values = [as_text(run.config[key]) if key in run.config else "(none)" for run in runs]
        if len({*values}) > 1:
            rows.append([key, *values])
    versions = dict.fromkeys(name for run in runs for name in run.summary["versions"])
    for name in versions:
        values = [run.summary["versions"].get(name, "not known") for run in runs]
        if len({*values}) > 1:
            rows.append([f"version of {name}", *values])
    if not rows:
        return _note("The configurations are equal.")
    return _note("Keys that differ:") + _table(["key", *(run.name for run in runs)], rows)
