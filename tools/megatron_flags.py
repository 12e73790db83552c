#!/usr/bin/env python3
"""Write docs/megatron_flags.md from megatron_rl/megatron_plugin/flags.yaml."""

import argparse
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "megatron_rl" / "megatron_plugin" / "flags.yaml"
PAGE = ROOT / "docs" / "megatron_flags.md"
HEAD = """\
# Megatron-LM's arguments in a run with RL

Every argument of Megatron-LM 0.18 and 0.19, and what it means once `--rl-config` is given
([pretraining.md](pretraining.md)). Without `--rl-config` all of them are Megatron's. A number in
parentheses is the only release that has the argument.

| State | |
|---|---|
| works | has its Megatron meaning |
| matches | has its Megatron meaning, and `config.json` of the run's `model` must say the same |
| set to | the plug-in makes this the default |
| only | has its Megatron meaning with these values, which may be others than the default |
| refused | stops the run before a model is built |
| no effect | is accepted; the last column says what decides instead |

<!-- Written by tools/megatron_flags.py from megatron_rl/megatron_plugin/flags.yaml. -->
"""


def page() -> str:
    """Return the page: a table per topic."""
    table = yaml.safe_load(TABLE.read_text())
    only = {flag: name for name, flags in table["only_in"].items() for flag in flags.split()}
    parts = [HEAD]
    for topic in table["topics"]:
        parts.append(f"\n## {topic['title']}\n\n| Arguments | State | |\n|---|---|---|\n")
        for state in ("works", "matches", "refused", "decided"):
            parts += [row(state, rule, only) for rule in topic.get(state, [])]
    return "".join(parts)


def row(state: str, rule: dict[str, Any], only: dict[str, str]) -> str:
    """Return the line of a rule."""
    flags = ", ".join(
        f"`{f}`" + (f" ({only[f]})" if f in only else "") for f in rule["flags"].split()
    )
    values = ", ".join(shown(value) for value in rule.get("values", []))
    text = rule["why"]
    if rule.get("set"):
        label = f"set to {values}"
    elif values:
        label = "required" if values == "on" else f"only {values}"
    else:
        label = "no effect" if state == "decided" else state
    if state == "refused":
        text += f". Remedy: {rule.get('do', 'leave it out')}"
    for flag, wanted in rule.get("when", {}).items():
        text = f"with `{flag}{'' if wanted is True else ' ' + ' '.join(wanted)}`: {text}"
    text = re.sub(r"(?<![`\w-])(--[a-z][\w-]*)(?![`\w])", r"`\1`", text)
    return f"| {flags} | {label} | {text} |\n"


def shown(value: Any) -> str:
    """Return a value as on a command line."""
    if isinstance(value, bool):
        return "on"  # of an argument that is a switch, in either direction
    return "none" if value is None else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
