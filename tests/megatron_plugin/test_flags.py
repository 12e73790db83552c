"""The table of Megatron-LM's arguments: complete, true to the page, and carried out by refusals."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.megatron_plugin import arguments, flags
from tests.e2e.processes import ROOT, TORCHRUN, hide

NEEDED = [
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
    *("--disable-bias-linear", "--hidden-dropout", "0", "--attention-dropout", "0"),
]
"""What every RL run has to say, because Megatron's defaults are others."""
EXPERTS = ["--num-experts", "4", "--moe-router-dtype", "fp32", "--moe-grouped-gemm"]


def parser() -> argparse.ArgumentParser:
    from tests.megatron_plugin.quick_parser import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@functools.cache
def plugged() -> argparse.ArgumentParser:
    with_defaults = parser()
    flags.set_defaults(with_defaults)
    return with_defaults


def refusal(argv: list[str]) -> str:
    """Return why these arguments are refused; "" if they are not."""
    try:
        flags.refuse(plugged(), argv)
    except ConfigError as error:
        return str(error)
    return ""


def test_the_table_has_every_argument_of_the_installed_release_once() -> None:
    from megatron.core.package_info import MAJOR, MINOR

    release = f"{MAJOR}.{MINOR}"
    rules, only = flags.rules(), flags.read_table()["only_in"]
    listed = [flag for rule in rules for flag in rule.flags if not rule.when]
    conditional = {flag for rule in rules for flag in rule.flags if rule.when}
    assert sorted(listed) == sorted(set(listed))
    table, actions = {*listed, *conditional}, parser()._option_string_actions
    lacking = {a.option_strings[0] for a in actions.values() if not table & {*a.option_strings}}
    assert lacking == set(), "flags.yaml does not say what these mean"
    limited = {flag: where for where, names in only.items() for flag in names.split()}
    assert set(limited) <= table
    absent = {flag for flag in table if limited.get(flag, release) == release} - set(actions)
    assert absent == set(), f"Megatron-Core {release} does not have these"
    others = {flag for flag, where in limited.items() if where in {"0.18", "0.19"} - {release}}
    assert others & set(actions) == set(), f"Megatron-Core {release} has these too"


def unfit(action: argparse.Action, rule: flags.FlagRule) -> list[str] | None:
    """Return words that give an argument a value that its rule refuses; None if none can."""
    if action.nargs == 0:
        return [action.option_strings[0]] if not rule.allows(action.const) else None
    options: list[Any] = [*(action.choices or ()), "7", "0.7", "[1]", "full"]
    for option in options:
        word = str(getattr(option, "name", option))
        try:
            value = action.type(word) if callable(action.type) else word
        except (ValueError, TypeError, KeyError, AssertionError):
            continue
        if not rule.allows(value):
            count = action.nargs if isinstance(action.nargs, int) else 1
            return [action.option_strings[-1], *[word] * count]
    return None


def test_every_refused_argument_is_refused_by_name_with_the_remedy() -> None:
    assert refusal(NEEDED) == refusal([*NEEDED, *EXPERTS]) == ""
    actions, free = parser()._option_string_actions, []
    for rule in (rule for rule in flags.rules() if rule.state == "refused"):
        given = [*NEEDED]
        for flag, wanted in rule.when.items():
            given += [flag, "4" if wanted is True else wanted[0]]
        for action in (actions[flag] for flag in rule.flags if flag in actions):
            words = unfit(action, rule)
            if words is None:
                free.append(action.option_strings[0])
                continue
            forms = [words, ["=".join(words)]] if len(words) < 3 else [words]
            for form in forms:
                message = refusal([*given, *form])
                line = next((x for x in message.splitlines() if words[0] in x), "")
                assert line == f"{' '.join(form)}: {rule.why}. Remedy: {rule.do}", message
    # Switches that RL needs; their absence is refused below.
    assert sorted(free) == [
        "--calculate-per-token-loss", "--disable-bias-linear", "--moe-grouped-gemm", "--swiglu",
    ]  # fmt: skip


def test_defaults_of_megatron_that_do_not_fit_are_named_with_the_remedy() -> None:
    message = refusal([])
    for line in (
        "--position-embedding-type is not given: ",
        "Remedy: add --swiglu",
        "--disable-bias-linear is not given: ",
        "--hidden-dropout is not given: the log-probs",
    ):
        assert line in message
    experts = refusal([*NEEDED, "--num-experts", "4"])
    assert "Remedy: add --moe-router-dtype fp32" in experts
    assert "Remedy: add --moe-grouped-gemm" in experts
    local = refusal([*NEEDED, *EXPERTS, "--transformer-impl", "local"])
    assert local.splitlines()[1:] and local.splitlines()[1].startswith("--moe-grouped-gemm: ")


def test_the_plug_ins_defaults_are_set_and_other_values_refused() -> None:
    args = plugged().parse_args([])
    assert (args.dataloader_type, args.rerun_mode) == ("external", "disabled")
    assert args.calculate_per_token_loss is args.exit_signal_handler is True


def test_extending_the_parser_checks_the_arguments_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *NEEDED, "--fp16", "--rl-config", "x"])
    with pytest.raises(ConfigError, match=r"\n--fp16: .*Remedy: use --bf16"):
        arguments.extend(parser())
    assert arguments.add_arguments(parser()).parse_args().fp16


def test_the_page_is_the_table() -> None:
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools/megatron_flags.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    written = "run `python tools/megatron_flags.py`"
    assert (ROOT / "docs/megatron_flags.md").read_text() == tool.page(), written


@pytest.mark.e2e
def test_a_started_script_ends_with_the_flag_and_the_remedy(tmp_path: Path) -> None:
    config = tmp_path / "rl.yaml"
    config.write_text(
        f"output_dir: {tmp_path}/rl\nmodel: tiny_dense\nroles: {{generator_ranks: 1}}\n"
    )
    command = [*TORCHRUN, "--nproc-per-node=2", "-m", "megatron_rl.compat.megatron_cpu"]
    command += ["examples/pretrain_gpt.py", *NEEDED, "--rl-config", str(config)]
    command += ["--moe-router-topk-scaling-factor", "2.5"]
    path = {"PYTHONPATH": hide(tmp_path / "hidden", "modelopt", "wandb")}
    began = time.perf_counter()
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | path, capture_output=True, text=True, timeout=240
    )
    print(f"refused after {time.perf_counter() - began:.1f} s")
    assert ended.returncode != 0
    flag, remedy = "--moe-router-topk-scaling-factor 2.5: config.json", "Remedy: leave it out"
    last = [line.strip() for line in ended.stderr.splitlines()[-4:]]
    assert any(line.startswith(flag) and line.endswith(remedy) for line in last), ended.stderr
    assert not (tmp_path / "rl").exists()
