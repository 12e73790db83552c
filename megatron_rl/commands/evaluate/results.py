"""What an evaluation found, as JSON: estimates of each set, rows for the fitter, and completions.

`--json` writes one object, layout `megatron_rl.commands.evaluate/1`:

    {"schema": "megatron_rl.commands.evaluate/1", "checkpoint": "...", "step": 500,
     "compute": {"compute_tokens": 1.2e7, ...}, "sampling": {"samples": 16, ...},
     "sets": [{"data": "aime2024", "pass_rate": 0.41, "pass_rate_stderr": 0.01,
               "mean_at_n": {"value": 0.41, "standard_error": 0.07}, "pass_at_k": {"1": {...}},
               "majority_at_n": {...}, "by_difficulty": [...], "verdicts": {...}, ...}]}

`pass_rate_stderr` is the error from sampling, for these prompts (as in metrics.jsonl: what scatters
a curve's points); the other standard errors are over prompts (what scatters sets of questions).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.commands.evaluate.estimators import Estimate, Row, by_difficulty
from megatron_rl.commands.evaluate.questions import EvaluationSet
from megatron_rl.commands.evaluate.sampling import Answer
from megatron_rl.commands.evaluate.votes import WITHOUT_VOTES
from megatron_rl.orchestrator.evaluation import sampling_stderr
from megatron_rl.rewards import Outcome

SCHEMA = "megatron_rl.commands.evaluate/1"


def powers_of_two(samples: int) -> list[int]:
    """1, 2, 4 ... and the number itself: the k of pass@k."""
    return sorted({*(2**i for i in range(samples.bit_length()) if 2**i <= samples), samples})


def table_of(
    questions: EvaluationSet, answers: list[Answer], samples: int
) -> tuple[list[list[bool]], list[list[str | None]]]:
    """`passed[prompt][sample]`, and the votes."""
    passed = [[False] * samples for _ in questions.prompts]
    votes: list[list[str | None]] = [[None] * samples for _ in questions.prompts]
    for a in answers:
        passed[a.prompt][a.sample] = a.outcome is Outcome.CORRECT
        votes[a.prompt][a.sample] = a.vote
    return passed, votes


def rows_of(questions: EvaluationSet, answers: list[Answer], samples: int) -> list[Row]:
    """The per-difficulty table, all prompts last; no levels where there is one alone."""
    passed, votes = table_of(questions, answers, samples)
    can_vote = not any(p.kind in WITHOUT_VOTES for p in questions.prompts)
    rows = by_difficulty(
        [p.difficulty or "none" for p in questions.prompts],
        passed,
        ks=powers_of_two(samples),
        answers=votes if can_vote else None,
    )
    return rows if len(rows) > 2 else rows[-1:]


def measured(questions: EvaluationSet, answers: list[Answer], samples: int) -> dict[str, Any]:
    """The estimates of one set.

    Args:
        questions: the set.
        answers: its completions.
        samples: completions of each prompt.
    """
    passed, _ = table_of(questions, answers, samples)
    table = np.array(passed, dtype=float)
    rows = rows_of(questions, answers, samples)
    whole = _row(rows[-1])
    return {
        "data": questions.name,
        "num_prompts": len(questions.prompts),
        "samples_per_prompt": samples,
        "pass_rate": float(table.mean(axis=1).mean()),
        "pass_rate_stderr": sampling_stderr(table),
        **{name: whole[name] for name in ("mean_at_n", "pass_at_k", "majority_at_n")},
        "by_difficulty": [_row(row) for row in rows[:-1]],
        "verdicts": dict(sorted(Counter(a.outcome.value for a in answers).items())),
        "completion_tokens_mean": float(np.mean([a.tokens for a in answers])),
        "truncated_fraction": float(np.mean([a.truncated for a in answers])),
        "interrupted_fraction": float(np.mean([a.interrupted for a in answers])),
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "difficulty": row.difficulty,
        "num_prompts": row.prompts,
        "mean_at_n": _estimate(row.mean),
        "pass_at_k": {str(k): _estimate(e) for k, e in row.passed.items()},
        "majority_at_n": None if row.majority is None else _estimate(row.majority),
    }


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "standard_error": estimate.standard_error}


def beside_the_run(row: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    """The run's own evaluation of the same weights and prompts, and how far it is.

    Args:
        row: the run's row of metrics.jsonl, or its part of one task.
        found: `measured` of the same set.
    """
    error = float(np.hypot(row["pass_rate_stderr"], found["pass_rate_stderr"]))
    return {
        "pass_rate": row["pass_rate"],
        "pass_rate_stderr": row["pass_rate_stderr"],
        "difference_in_standard_errors": (found["pass_rate"] - row["pass_rate"]) / error,
    }


def completion_rows(
    sets: list[EvaluationSet], answers: Iterable[Answer]
) -> Iterator[dict[str, Any]]:
    """A row for each completion."""
    by_name = {s.name: s for s in sets}
    for a in answers:
        prompt = by_name[a.data].prompts[a.prompt]
        yield {
            "data": a.data,
            "id": by_name[a.data].ids[a.prompt],
            "sample": a.sample,
            "kind": prompt.kind,
            "difficulty": prompt.difficulty,
            "prompt": prompt.text,
            "gold": prompt.gold,
            "completion": a.text,
            "tokens": a.tokens,
            "truncated": a.truncated,
            "interrupted": a.interrupted,
            "verdict": a.outcome.value,
            "reason": a.reason,
            "vote": a.vote,
        }


def fit_rows(result: dict[str, Any], series: str) -> list[dict[str, Any]]:
    """A point of a curve for each set, as `megatron-rl fit` reads them.

    Args:
        result: the object of `--json`; it must know the run's compute.
        series: name of the curve; with several sets theirs follows.
    """
    several = len(result["sets"]) > 1
    names = ("pass_rate", "pass_rate_stderr", "num_prompts", "samples_per_prompt")
    return [
        {
            "series": f"{series}/{found['data']}" if several else series,
            "step": result["step"],
            **result["compute"],
            **{name: found[name] for name in names},
        }
        for found in result["sets"]
    ]


def add_points(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add points to a file of them; a point of the same series and step is replaced."""
    old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    key = ("series", "step")
    new = {tuple(row[k] for k in key) for row in rows}
    kept = [r for line in old if line.strip() and (r := json.loads(line))]
    kept = [r for r in kept if tuple(r.get(k) for k in key) not in new]
    points = sorted([*kept, *rows], key=lambda r: (str(r.get("series")), r.get("step") or 0))
    write_lines(path, points)


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON Lines, as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f"{path.name}.tmp")
    with work.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(work, path)
