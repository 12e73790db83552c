"""The facts of a run's folder that its page shows; files that are missing or torn are named."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as pc
import yaml

from megatron_rl.commands.view.cli import run_state
from megatron_rl.config import ConfigError, describe
from megatron_rl.metrics.curves import UNITS
from megatron_rl.metrics.metrics_file import MetricsError, Row, read_metrics
from megatron_rl.metrics.rollouts import read_rollouts
from megatron_rl.metrics.run_report import SCHEMA, is_reported, summarize
from megatron_rl.recipes import flatten
from megatron_rl.run_lock import last_error

DEFAULT_COMPUTE = "train_device_hours"  # of runs without config.yaml
MOST_FILES, MOST_SLOW, MOST_SHOWN = 200, 8, 3  # newest rollout files, prompts, completions
ABOUT = ("step", "task", "prompt_id", "group", "prompt", "reward", "advantage", "verdict",
         "seconds_to_arrive", "seconds_to_verify")  # fmt: skip


@dataclass(slots=True)
class RunFacts:
    """A run; `config` has dotted keys, `fits` is that of `summarize`."""

    folder: Path
    name: str
    rows: list[Row]
    config: dict[str, Any]
    state: str = ""
    problems: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    fits: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_run(folder: Path, name: str, compute: str = "") -> RunFacts:
    """Return the facts of a run, fitted over its `fit.compute`, or over `compute` if given.

    Raises:
        ConfigError: the folder has no readable metrics.jsonl.
    """
    path = folder / "metrics.jsonl"
    remedy = "RUN must be the output_dir of a run that has begun, with its metrics.jsonl"
    if not path.is_file():
        what = "it has no metrics.jsonl" if folder.is_dir() else "no such folder"
        raise ConfigError(f"{folder}: {what}: {remedy}")
    try:
        rows = read_metrics(path)
    except MetricsError as e:
        raise ConfigError(f"{e}: {remedy}, written by this version of the package") from None
    run = RunFacts(folder, name, rows, {})
    config = _read(run, "config.yaml", "the configuration is not known", yaml.safe_load)
    run.config = dict(flatten(config))
    last = _summary(run)
    compute = compute or run.config.get("fit.compute", DEFAULT_COMPUTE)
    run.summary, run.fits = summarize(
        rows,
        path,
        fit_compute=compute if compute in UNITS else DEFAULT_COMPUTE,
        phases={n: x for n, x in last.get("wall_seconds", {}).items() if n != "total"},
        versions=last.get("versions"),
        extra=last.get("run"),
    )
    return run


def _read(run: RunFacts, name: str, without: str, parse: Any) -> dict[str, Any]:
    """Return the mapping of a file of the run, or name the problem and return {}."""
    try:
        values = parse((run.folder / name).read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
        problem = "it is no mapping"
    except FileNotFoundError:
        problem = "it is not there"
    except (OSError, ValueError, yaml.YAMLError) as e:
        problem = " ".join(f"{type(e).__name__}: {e}".split())
    run.problems.append(f"{name}: {problem}: {without}")
    return {}


def _summary(run: RunFacts) -> dict[str, Any]:
    """Return summary.json if the end of the run has written it, and set the state of the run."""
    run.state = run_state(run.folder) or "the run goes on"
    if is_reported(run.folder):
        last = _read(run, "summary.json", "seconds by phase and versions are not known", json.loads)
        if last.get("schema") == SCHEMA:
            if run.state != "the run goes on":
                stopped = last["run"].get("interrupted")
                ended = "was interrupted, with a checkpoint," if stopped else "has ended"
                run.state = f"the run {ended} after {last['steps']} steps"
            return last
    elif error := last_error(run.folder):
        run.state += f"; it has failed: {error}"
    run.problems.append(
        "The run has not written its report (summary.json), or went on since: seconds by phase and"
        " versions of packages are known when it has ended."
    )
    return {}


def defaults(config: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return (default as text, help text) of the keys of a configuration that this version has."""
    described: dict[str, list[tuple[str, str]]] = {}
    for key, _, default, about in describe():
        described.setdefault(key, []).append((default, about))
    out = {}
    for key in config:
        parent = key.rpartition(".")[0]
        entry = re.sub(r"^(tasks|\w+\.sets)\.[^.]+", r"\1.<name>", key)
        kind = f"[{config.get(f'{parent}.kind')}]"
        if choices := described.get(key) or described.get(entry):
            out[key] = next((c for c in choices if c[1].startswith(kind)), choices[0])
            if out[key][0] == "the name":
                out[key] = repr(parent.rpartition(".")[2]), out[key][1]
        elif any(name.startswith(f"{key}.<name>.") for name in described):
            out[key] = "{}", "Entries by name."
    return out


def as_text(value: Any) -> str:
    """Return a value of a configuration as `describe` writes defaults."""
    return repr(tuple(value) if isinstance(value, list) else value)


def training_rows(run: RunFacts, columns: tuple[str, ...], most: int) -> tuple[Any, str]:
    """Return the rows of the newest rollout files of steps, and which these are.

    The table (`pyarrow.Table`) is None if there are none, and the text then says why.
    """
    files = sorted((run.folder / "rollouts").glob("step_*.parquet"))
    if not files:
        return None, "No rollout files of steps are there (metrics.rollouts_every_steps)."
    tables = []
    for path in files[-most:]:
        try:
            tables.append(read_rollouts(path, columns))
        except FileNotFoundError:  # a living run removes the oldest
            continue
        except (MetricsError, pyarrow.ArrowException) as e:
            return None, f"The rollout files cannot be read: {path.name}: {e}"
    which = f"the newest {most} of {len(files)}" if len(files) > most else f"all {len(files)}"
    return pyarrow.concat_tables(tables), f"Of {which} rollout files of steps."


def slowest_prompts(run: RunFacts) -> tuple[list[Row], str]:
    """Return the prompts whose completions took longest to arrive and be verified, on average."""
    table, which = training_rows(run, ABOUT, MOST_FILES)
    if table is None:
        return [], which
    seconds = pc.add(table["seconds_to_arrive"], pc.fill_null(table["seconds_to_verify"], 0.0))
    table = table.append_column("seconds", seconds).filter(pc.is_valid(seconds))
    wanted = [("seconds", "mean"), ("seconds", "max"), ("reward", "mean"), ("prompt", "min"),
              ("seconds", "count")]  # fmt: skip
    prompts = table.group_by(["task", "prompt_id"]).aggregate(wanted)
    return prompts.sort_by([("seconds_mean", "descending")]).slice(0, MOST_SLOW).to_pylist(), which


def best_and_worst(run: RunFacts) -> tuple[dict[str, list[Row]], str]:
    """Return completions of the newest steps by reward, then advantage; one of a group."""
    table, which = training_rows(run, (*ABOUT, "completion"), 20)
    if table is None:
        return {}, which
    order = [(name, "descending") for name in ("reward", "advantage")]
    rows = [row for row in table.sort_by(order).to_pylist() if row["reward"] is not None]
    shown = {}
    for title, candidates in (("Best completions", rows), ("Worst completions", rows[::-1])):
        # Where advantages are null, the row has no gradient: it is shown if nothing else is left.
        candidates = sorted(candidates, key=lambda row: row["advantage"] is None)
        groups = {row["group"]: row for row in reversed(candidates)}
        chosen = {id(row) for row in groups.values()}
        shown[title] = [row for row in candidates if id(row) in chosen][:MOST_SHOWN]
    return shown, which
