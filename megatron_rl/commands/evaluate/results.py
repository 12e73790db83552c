"""The results of an evaluation: estimates, completions, points for the fitter, and tables.

`--json` writes one object, layout `megatron_rl.commands.evaluate/1`:

    {"schema": "megatron_rl.commands.evaluate/1", "checkpoint": "...", "step": 500,
     "compute": {"compute_tokens": 1.2e7, ...}, "sampling": {"samples": 16, ...},
     "sets": [{"data": "aime2024", "pass_rate": 0.41, "pass_rate_stderr": 0.01,
               "mean_at_n": {"value": 0.41, "standard_error": 0.07}, "pass_at_k": {"1": {...}},
               "majority_at_n": {...}, "by_difficulty": [...], "verdicts": {...}, ...}]}

`pass_rate_stderr` is the error from sampling, for these prompts (the scatter of a curve's points,
as in metrics.jsonl); the other standard errors are over prompts.
"""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from megatron_rl.commands.evaluate.estimators import by_difficulty, estimates
from megatron_rl.data import Prompt
from megatron_rl.files import replace_file
from megatron_rl.messages import ints
from megatron_rl.orchestrator.evaluation import EvaluatedSample, sampling_stderr
from megatron_rl.rewards import Outcome, Verdict
from megatron_rl.rewards.math import verify
from megatron_rl.rewards.math.extract import NoAnswer, after_thinking, bare_answer, last_box
from megatron_rl.rewards.math.node import MAX_CHARACTERS, OverLimit

SCHEMA = "megatron_rl.commands.evaluate/1"
RIGHT = "right"  # vote of every correct answer of mathematics: all equal the gold answer
# Verifiers of answers that have no majority: equal programs are hardly ever equal texts.
WITHOUT_VOTES = frozenset({"code"})
Row = dict[str, Any]
Sets = dict[str, list[tuple[str, Prompt]]]  # name -> (id of a question in its data set, prompt)


def vote(kind: str, text: str, verdict: Verdict, think_end: str) -> str | None:
    """Return a completion's answer, as `join_votes` takes it, or None."""
    if kind in WITHOUT_VOTES or verdict.outcome is Outcome.NO_ANSWER:
        return None
    if verdict.passed and kind == "math":
        return RIGHT
    try:
        tail = after_thinking(text, think_end, required=False)
        answer = bare_answer(tail) if (box := last_box(tail)) is None else box
    except (NoAnswer, OverLimit):
        return None
    if len(answer) > MAX_CHARACTERS:
        return None
    return f"= {answer.strip()}"


def join_votes(rows: list[Row]) -> None:
    """Give one vote to wrong answers to a prompt that the verifier of mathematics takes for equal.

    The right ones have one: both are joined alike, so that a majority is not too easily right.
    """
    first: dict[str, str] = {}
    for row in rows:
        vote, outcome = row["vote"], row["verdict"]
        if row["kind"] != "math" or vote in (None, RIGHT) or outcome == Outcome.TIMED_OUT:
            continue
        if vote not in first:
            first[vote] = next((first[v] for v in first if _equal(vote[2:], v[2:])), vote)
        row["vote"] = first[vote]


def _equal(a: str, b: str) -> bool:
    return verify(a, b).passed or verify(b, a).passed


def completion_rows(
    sets: Sets, samples: Iterable[EvaluatedSample], tokenizer: Tokenizer, think_end: str
) -> list[Row]:
    """Return the rows of `--jsonl`; completions are in the order of prompts, over all sets."""
    prompts = [(name, *pair) for name, pairs in sets.items() for pair in pairs]
    rows: list[Row] = []
    for sample, verdict in samples:
        data, question_id, prompt = prompts[sample.prompt_id]
        text = str(tokenizer.decode(ints(sample.token_ids).tolist(), skip_special_tokens=False))
        row = {
            "data": data,
            "id": question_id,
            "sample": sample.index,
            "kind": prompt.question.kind,
            "difficulty": prompt.question.difficulty,
            "prompt": prompt.text,
            "gold": prompt.question.gold,
            "completion": text,
            "tokens": sample.own_tokens,
            "truncated": sample.finish_reason == "length",
            "interrupted": sample.count("forced") > 0,
            "verdict": verdict.outcome.value,
            "reason": verdict.reason,
            "vote": vote(prompt.question.kind, text, verdict, think_end),
        }
        rows.append(row)
    for _, group in groupby(rows, lambda row: (row["data"], row["id"])):
        join_votes(list(group))
    return rows


def set_results(name: str, rows: list[Row], n: int) -> dict[str, Any]:
    """Return the estimates of one set from its rows, n for each prompt."""
    passed = np.array([row["verdict"] == Outcome.CORRECT for row in rows]).reshape(-1, n)
    answers = np.array([row["vote"] for row in rows], dtype=object).reshape(-1, n)
    votes = None if any(row["kind"] in WITHOUT_VOTES for row in rows) else answers
    levels = [row["difficulty"] or "none" for row in rows[::n]]
    keys = ("tokens", "truncated", "interrupted")
    tokens, truncated, interrupted = (float(np.mean([row[key] for row in rows])) for key in keys)
    return {
        "data": name,
        "samples_per_prompt": n,
        "pass_rate": float(passed.mean()),
        "pass_rate_stderr": sampling_stderr(passed.astype(float)),
        **estimates(passed, votes),
        "by_difficulty": by_difficulty(levels, passed, votes),
        "verdicts": dict(sorted(Counter(row["verdict"] for row in rows).items())),
        "completion_tokens_mean": tokens,
        "truncated_fraction": truncated,
        "interrupted_fraction": interrupted,
    }


def compare_with_run(one: dict[str, Any], evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return a set's results, with the run's own on the same weights and prompts if it has them."""
    data, _, task = one["data"].partition("/")
    run = evaluation.get("tasks", {}).get(task) if task else evaluation
    if data != "run" or not run:
        return one
    error = np.hypot(run["pass_rate_stderr"], one["pass_rate_stderr"])
    difference = float((one["pass_rate"] - run["pass_rate"]) / error)
    comparison = {name: run[name] for name in ("pass_rate", "pass_rate_stderr")}
    return {**one, "run_evaluation": comparison | {"difference_in_standard_errors": difference}}


def fit_rows(result: dict[str, Any], series: str) -> list[Row]:
    """Return a point of a curve for each set; with several sets, their names follow `series`."""
    names = ("pass_rate", "pass_rate_stderr", "num_prompts", "samples_per_prompt")
    return [
        {
            "series": f"{series}/{one['data']}" if len(result["sets"]) > 1 else series,
            "step": result["step"],
            **result["compute"],
            **{name: one[name] for name in names},
        }
        for one in result["sets"]
    ]


def add_points(path: Path, rows: list[Row]) -> None:
    """Add points to a file; a point of the same series and step is replaced."""
    old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    points = {(r.get("series"), r.get("step")): r for r in map(json.loads, filter(str.strip, old))}
    points |= {(r["series"], r["step"]): r for r in rows}
    write_lines(path, [points[key] for key in sorted(points, key=lambda k: (str(k[0]), k[1] or 0))])


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write JSON Lines, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def show(result: dict[str, Any]) -> None:
    """Print a table for each set, and the run's own pass rate if it has one."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    step = "" if result["step"] is None else f" (step {result['step']})"
    say(f"{result['checkpoint']}{step}")
    for one in result["sets"]:
        console.print(_table(one))
        verdicts = ", ".join(f"{n} {kind}" for kind, n in one["verdicts"].items())
        say(
            f"{verdicts}; {one['completion_tokens_mean']:.0f} tokens on average,"
            f" {one['truncated_fraction']:.1%} truncated,"
            f" {one['interrupted_fraction']:.1%} interrupted"
        )
        if (run := one.get("run_evaluation")) is not None:
            say(
                f"the run's own evaluation {_pass_rate(run)}, this one {_pass_rate(one)} (errors"
                f" from sampling): {run['difference_in_standard_errors']:+.1f} standard errors off"
            )


def _table(one: dict[str, Any]) -> Table:
    n = one["samples_per_prompt"]
    ks = [k for k in one["pass_at_k"] if k != "1"]
    majority = [] if one["majority_at_n"] is None else [f"majority@{n}"]
    table = Table(title=f"{one['data']} (percent)", title_justify="left", header_style="bold")
    table.add_column("difficulty", no_wrap=True)
    for name in ("prompts", f"mean@{n}", *(f"pass@{k}" for k in ks), *majority):
        table.add_column(name, justify="right", no_wrap=True)
    for row in (*one["by_difficulty"], {"difficulty": "all", **one}):
        columns = [row["mean_at_n"], *(row["pass_at_k"][k] for k in ks)]
        columns += [row["majority_at_n"]] * len(majority)
        cells = [_percent(estimate) for estimate in columns]
        table.add_row(row["difficulty"], str(row["num_prompts"]), *cells)
    return table


def _percent(estimate: dict[str, Any]) -> str:
    error = estimate["standard_error"]
    return f"{100 * estimate['value']:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def _pass_rate(row: dict[str, Any]) -> str:
    return f"{row['pass_rate']:.1%} ± {row['pass_rate_stderr']:.1%}"
