"""An evaluation at the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

WIDE = 120
"""Columns where there is no terminal to fit into."""


def make_console() -> Console:
    """The console on standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


def show(result: dict[str, Any], console: Console) -> None:
    """Print a table for each set, and what the run itself measured."""
    step = "" if result["step"] is None else f" (step {result['step']})"
    console.print(f"{result['checkpoint']}{step}", highlight=False, soft_wrap=True)
    for found in result["sets"]:
        console.print(_table(found, result["sampling"]["samples"]))
        verdicts = ", ".join(f"{n} {kind}" for kind, n in found["verdicts"].items())
        console.print(
            f"{verdicts}; {found['completion_tokens_mean']:.0f} tokens on average,"
            f" {found['truncated_fraction']:.1%} truncated,"
            f" {found['interrupted_fraction']:.1%} interrupted",
            highlight=False,
            soft_wrap=True,
        )
        if (run := found.get("run_evaluation")) is not None:
            console.print(
                f"the run's own evaluation {_sampled(run)}, this one {_sampled(found)} (errors from"
                f" sampling): {run['difference_in_standard_errors']:+.1f} standard errors off",
                highlight=False,
                soft_wrap=True,
            )


def _table(found: dict[str, Any], samples: int) -> Table:
    rows = [*found["by_difficulty"], {"difficulty": "all", **found}]
    ks = list(found["pass_at_k"])
    title = f"{found['data']} (percent)"
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("difficulty", no_wrap=True)
    titles = ["prompts", f"mean@{samples}", *(f"pass@{k}" for k in ks if k != "1")]
    if found["majority_at_n"] is not None:
        titles.append(f"majority@{samples}")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        estimates = [row["mean_at_n"], *(row["pass_at_k"][k] for k in ks if k != "1")]
        if row["majority_at_n"] is not None:
            estimates.append(row["majority_at_n"])
        table.add_row(
            str(row["difficulty"]), str(row["num_prompts"]), *(_shown(e) for e in estimates)
        )
    return table


def _shown(estimate: dict[str, Any]) -> str:
    error = estimate["standard_error"]
    return f"{100 * estimate['value']:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def _sampled(row: dict[str, Any]) -> str:
    return f"{row['pass_rate']:.1%} ± {row['pass_rate_stderr']:.1%}"
