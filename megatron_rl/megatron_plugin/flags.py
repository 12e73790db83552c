"""The meaning of each of Megatron-LM's arguments in a run with `--rl-config` (`flags.yaml`)."""

import argparse
import enum
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import takewhile
from typing import Any

import yaml

from megatron_rl.config import ConfigError


@dataclass(frozen=True)
class FlagRule:
    """Arguments that have one meaning for one reason; `flags.yaml` says what the fields mean."""

    state: str
    flags: list[str]
    why: str
    do: str = "leave it out"
    values: list[Any] = field(default_factory=list)
    set: bool = False
    when: dict[str, Any] = field(default_factory=dict)

    def allows(self, value: Any) -> bool:
        """Return True if a refused argument may have this parsed value."""
        if not self.values:
            return not value
        given = value if isinstance(value, list) else [value]
        return all((v.name if isinstance(v, enum.Enum) else v) in self.values for v in given)


@cache
def rules() -> list[FlagRule]:
    """Return the table, in its order."""
    return [
        FlagRule(state, **{**rule, "flags": rule["flags"].split()})
        for topic in read_table()["topics"]
        for state in ("works", "matches", "decided", "refused")
        for rule in topic.get(state, [])
    ]


@cache
def read_table() -> dict[str, Any]:
    """Return `flags.yaml` as it is."""
    table: dict[str, Any] = yaml.safe_load(
        (resources.files(__package__) / "flags.yaml").read_text()
    )
    return table


def set_defaults(parser: argparse.ArgumentParser) -> None:
    """Make the values that RL needs the defaults of the parser's arguments, where it sets them."""
    for rule in rules():
        for flag in rule.flags if rule.set else ():
            parser.set_defaults(**{parser._option_string_actions[flag].dest: rule.values[0]})


def refuse(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Refuse arguments that a run with `--rl-config` cannot carry out.

    ConfigError names each of them as it was typed, the reason and the remedy.
    """
    args, _ = parser.parse_known_args(argv)
    actions, problems = parser._option_string_actions, []
    for rule in rules():
        conditions = [(getattr(args, actions[f].dest), v) for f, v in rule.when.items()]
        applies = all(bool(value) if v is True else value in v for value, v in conditions)
        if rule.state != "refused" or not applies:
            continue
        for action in (actions[flag] for flag in rule.flags if flag in actions):
            value = getattr(args, action.dest)
            if not rule.allows(value):
                label = _as_typed(action, argv) or f"{action.option_strings[0]} is not given"
                problems.append(f"{label}: {rule.why}. Remedy: {rule.do}")
    if problems:
        raise ConfigError("not possible with --rl-config:\n" + "\n".join(problems))


def _as_typed(action: argparse.Action, argv: list[str]) -> str:
    """Return the words that gave an argument its value; "" if it has its default."""
    for i in reversed(range(len(argv))):
        if argv[i].partition("=")[0] in action.option_strings:
            return " ".join([argv[i], *takewhile(lambda w: not w.startswith("--"), argv[i + 1 :])])
    return ""
