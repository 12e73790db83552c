"""From a study's file (docs/study.md) to the checked configurations of its runs."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.commands.study.runs import BUDGETS, Run
from megatron_rl.config import ConfigError, load_config

FOLDER = Path(__file__).parent
BASES = ("tiny", "8b", "scout")
PRESETS = tuple(sorted({path.stem for path in FOLDER.glob("*.yaml")} - {*BASES}))
OF_ENTRIES = ("config", "seeds", "repeats", "gpu_hours_per_completion")
"""Keys that a study gives to all of its entries; an entry can have its own."""
OF_STUDIES = ("summary", "source", "values", "budget", "shared_a", "runs", *OF_ENTRIES)
NOT_OF_RUNS = {"name", "paper", "published", *OF_ENTRIES}
"""Keys of entries that are not of the configuration."""


@dataclass(frozen=True, slots=True)
class Study:
    """A file, and the options of the command above it."""

    name: str
    values: dict[str, Any]  # contents of the file
    folder: Path  # of the file: its paths are relative to it
    output: Path
    configs: tuple[Path, ...] = ()
    """The first instead of the file's `config`, others instead of an entry's of the same model."""
    start_checkpoint: Path | None = None
    overrides: tuple[str, ...] = ()  # dotted options for all runs

    def runs(self) -> list[Run]:
        """Return all runs, seed by seed.

        Raises:
            ConfigError: a run that its recipe or a value does not allow, or two of one name.
        """
        shared = {key: self.values[key] for key in OF_ENTRIES if key in self.values}
        shared |= self.values.get("values") or {}
        points = [point for entry in self.values["runs"] for point in _expand(shared | entry)]
        runs = [run for name, entry in points for run in self._of_seeds(name, entry)]
        names = [run.name for run in runs]
        if doubled := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"study {self.name}: several runs are {sorted(doubled)}: name them")
        return sorted(runs, key=lambda run: run.turn)

    def print_plan(self, runs: list[Run]) -> None:
        """Print state, sizes, estimated GPU-hours and commands of its runs."""
        total = 0.0
        print(f"{self.name}: {self.values.get('summary', '')}\n")
        width = max(len(run.name) for run in runs)
        form = f"{{:{width}}}  {{:16}}{{:>8}}{{:>10}}{{:>6}}{{:>11}}{{:>8}}"
        print(form.format("run", "state", "steps", "batch", "GPUs", "GPU-hours", "days"))
        for run in runs:
            s, devices, hours = run.config.schedule, run.config.roles.devices, run.gpu_hours
            ended, done = run.ended_by(), run.steps_done()
            state = f"ended by {ended}" if ended else f"at step {done}" if done else "new"
            cost = ("-", "-") if hours is None else (f"{hours:,.0f}", f"{hours / devices / 24:.1f}")
            batch = f"{s.prompts_per_step} x {s.completions_per_prompt}"
            print(form.format(run.name, state, s.steps, batch, devices, *cost))
            total += hours or 0.0
        if total:
            print(f"\n{total:,.0f} GPU-hours, an estimate for any number of GPUs:")
            print(f"steps x completions x hours of a completion. {self.values.get('source', '')}")
        for run in runs:
            if run.ended_by() is None:
                print(f"\n{shlex.join(['megatron-rl', *run.arguments])}")

    def _of_seeds(self, name: str, entry: dict[str, Any]) -> Iterator[Run]:
        """Yield a run for every repeat and seed.

        The problems and their split are those of the configuration's seed in all runs, so that none
        is evaluated on prompts that the start checkpoint has seen.
        """
        file = self._base(entry.get("config"))
        given = ["--start_checkpoint", str(self.start_checkpoint)] if self.start_checkpoint else []
        values = {key: value for key, value in entry.items() if key not in NOT_OF_RUNS}
        if (recipe := self.folder / str(values.get("recipe"))).is_file():
            values["recipe"] = str(recipe.resolve())
        options = (word for key, value in values.items() for word in (f"--{key}", _text(value)))
        shared = [*options, *self.overrides]
        try:
            base = load_config(file, [*shared, *given])
        except ConfigError as e:
            raise ConfigError(f"study {self.name}, run {name}: {e}") from None
        supervised: list[str] = []
        start = self.output / "start" / file.stem
        if (made := base.model_copy(update={"output_dir": start}).made_start) is not None:
            supervised = ["sft", "--config", str(file), *self.overrides, "--output_dir", str(start)]
            given = ["--start_checkpoint", str(made), "--sft.first", "false"]
        split = [f"--tasks.{task}.seed={base.seed_of(task)}" for task in base.tasks]
        seeds = entry.get("seeds", 1)
        seeds = range(1, seeds + 1) if isinstance(seeds, int) else seeds
        for turn, (repeat, seed) in enumerate(product(range(entry.get("repeats", 1)), seeds)):
            folder = self.output / name / (f"seed-{seed}" + f"-repeat-{repeat + 1}" * (repeat > 0))
            own = [*shared, *given, *split, "--seed", str(seed), "--output_dir", str(folder)]
            arguments = ["train", "--config", str(file), *own]
            budget = self.values.get("budget") or {}
            yield Run(name, turn, load_config(file, own), arguments, supervised, budget, entry)

    def _base(self, config: str | None) -> Path:
        if self.configs and config == self.values.get("config"):
            return self.configs[0]
        if config is None:
            raise ConfigError(f"study {self.name}: config is missing: name a base configuration")
        file = FOLDER / f"{config}.yaml" if config in BASES else self.folder / config
        others = {load_config(path).model: path for path in self.configs[1:]}
        return others.get(load_config(file).model, file)


def load(study: str, changes: dict[str, Any], output: Path | None = None, *rest: Any) -> Study:
    """Load a preset or a file; `changes` replace keys of it, `rest` are further fields of `Study`.

    Raises:
        ConfigError: no such study, or keys that it cannot have.
    """
    from megatron_rl.scaling.paper_points import published_series  # it imports SciPy

    path = FOLDER / f"{study}.yaml" if study in PRESETS else Path(study)
    if not path.is_file():
        raise ConfigError(f"study {study}: neither a file nor one of {', '.join(PRESETS)}")
    values = yaml.safe_load(path.read_text())
    values = values | changes if isinstance(values, dict) else {}
    if unknown := sorted({*values} - {*OF_STUDIES}):
        raise ConfigError(f"{path}: unknown keys {unknown}; a study has {', '.join(OF_STUDIES)}")
    entries = values.get("runs")
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise ConfigError(f"{path}: runs is {entries!r}, not a list of mappings")
    if unknown := sorted({*(values.get("budget") or {})} - {*BUDGETS}):
        raise ConfigError(f"{path}: budget has {unknown}; it can have {', '.join(BUDGETS)}")
    names = {entry["published"] for entry in entries if entry.get("published")}
    if unknown := sorted(names - {*published_series()}) if names else []:
        raise ConfigError(f"{path}: published has {unknown}: no series of published points")
    return Study(path.stem, values, path.parent, output or Path("runs") / path.stem, *rest)


def _expand(entry: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, entry with one value per key) for every point of an entry's grid."""
    values = {key: value for key, value in entry.items() if key not in NOT_OF_RUNS}
    grid = {key: value if isinstance(value, list) else [value] for key, value in values.items()}
    for point in product(*grid.values()):
        chosen = dict(zip(grid, point, strict=True))
        parts = [entry["name"]] if "name" in entry else []
        if "recipe" in chosen and (not parts or len(grid["recipe"]) > 1):
            parts.append(Path(chosen["recipe"]).stem)
        for key in (key for key in grid if len(grid[key]) > 1 and key != "recipe"):
            value = re.sub(r"[^\w.]+", "-", _text(chosen[key])).strip("-")
            parts.append(f"{key.rpartition('.')[2]}={value}")
        yield "-".join(parts) or Path(str(entry.get("config"))).stem, {**entry, **chosen}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
