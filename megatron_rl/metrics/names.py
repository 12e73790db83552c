"""The metrics of a run: every name in metrics.jsonl, with its meaning and unit (`names.yaml`)."""

from importlib import resources

import yaml

METRICS: dict[str, str] = yaml.safe_load((resources.files(__package__) / "names.yaml").read_text())
"""Name -> meaning and [unit]; the table is also the file's first line."""

COMPUTE = (*(name for name in METRICS if name.startswith("compute_")), "wall_seconds")
"""Cumulative metrics, in every step and eval row."""
SPENT = tuple(name for name in COMPUTE if "_train_" not in name)
"""Those that count all that ran: they never go back, whatever a resumed run trains again."""
