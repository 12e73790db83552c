"""Alarms: a run that learns nothing or may become unstable, with the likely cause and the remedy.

The newest steps are judged together, until they have `ENOUGH_COMPLETIONS` or are `MOST_STEPS`. The
messages are a row's `alarms`, which the terminal prints and summary.json lists. The threshold of
truncation is ScaleRL's (arXiv 2510.13786, appendix A.15).
"""

from collections import Counter, deque
from collections.abc import Sequence
from importlib import resources

import yaml

from megatron_rl.metrics.metrics_file import Row

ENOUGH_COMPLETIONS, MOST_STEPS = 100, 3
ENOUGH_TOKENS = 50
TRUNCATED_FRACTION = 0.1
_COUNTS = ("completions", "completions_truncated", "prompts_differing")
CAUSES: dict[str, str] = yaml.safe_load((resources.files(__package__) / "causes.yaml").read_text())
"""Most frequent verdict -> likely cause and remedy, where the rewards of no prompt differ."""


class Alarms:
    """Looks for alarms in the steps of a run."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque(maxlen=MOST_STEPS)

    def check(self, row: Row) -> dict[str, str]:
        """Return the messages of the alarms after one more step, by name."""
        self._rows.append(row)
        if (newest := _joined(self._rows)) is None:
            return {}
        completions, truncated, differing = (newest[name] for name in _COUNTS)
        alarms = {}
        if truncated >= TRUNCATED_FRACTION * completions:
            alarms["truncated"] = (
                f"{truncated / completions:.0%} of {completions} completions were truncated; 10-15%"
                " destabilize training, and under 5% is healthy: raise"
                " generation.answer_budget_tokens, or interrupt thinking (generation.interruption)"
            )
        if not differing:
            name = "no_answer" if newest["verdicts"].keys() == {"no_answer"} else "no_difference"
            alarms[name] = f"no prompt has two rewards, nothing is learned: {diagnosis(newest)}"
        for task in row.get("tasks", {}):
            part = _joined([r["tasks"][task] for r in self._rows])
            if part and part["verdicts"].keys() == {"no_answer"}:
                alarms[f"no_answer/{task}"] = f"task {task} has no answers: {diagnosis(part)}"
        return alarms


def diagnosis(row: Row) -> str:
    """Return verdicts, reward and likely cause, where the rewards of no prompt differ."""
    counts: dict[str, int] = row["verdicts"]
    mixed = 0 < counts.get("correct", 0) < sum(counts.values())
    cause = CAUSES["mixed" if mixed else max(counts, key=counts.__getitem__)]
    each = "each" if len(counts) == 1 else "mean"
    reward = f"{each} reward {row['reward_mean']:+.3g}" if "reward_mean" in row else "no reward"
    shown = [*(f"{n} {name}" for name, n in counts.items()), reward]
    if reason := row.get("frequent_failure"):
        shown.append(f"most often: {reason}")
    return f"{', '.join(shown)}. Likely cause: {cause}"


def mismatch(row: Row, limit: float) -> str | None:
    """Return why a run ends whose two sides compute different log-probs; None if they agree.

    Args:
        row: of a step; without `logprob_error_*` nothing was compared.
        limit: largest mean difference in nats.
    """
    tokens, mean = row.get("logprob_error_tokens", 0), row.get("logprob_error_mean", 0.0)
    if tokens < ENOUGH_TOKENS or mean <= limit:
        return None
    return (
        f"step {row['step']}: under the same weights trainer and generators computed log-probs that"
        f" differ by {mean:.3g} nats (mean; max {row['logprob_error_max']:.3g}) over {tokens:.0f}"
        f" tokens: the bound is {limit:g} (metrics.max_logprob_error). Likely causes: number"
        " formats or kernels that differ (precision; `megatron-rl doctor` on both sides), experts"
        " that are routed differently (algorithm.routing_replay), an engine that kept older weights"
        " or their cache. Take a checkpoint of a step at which the two agreed, or raise the bound"
    )


def _joined(rows: Sequence[Row]) -> Row | None:
    """Return the newest rows as one, with the last one's means; None while they are too few."""
    counts, verdicts = Counter[str](), Counter[str]()
    for number, row in enumerate(reversed(rows), 1):
        counts.update({name: row.get(name, 0) for name in _COUNTS})
        verdicts.update(row["verdicts"])
        if counts["completions"] >= ENOUGH_COMPLETIONS or number == MOST_STEPS:
            return {**rows[-1], **counts, "verdicts": verdicts}
    return None
