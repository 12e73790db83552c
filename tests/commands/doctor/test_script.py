"""The doctor's reading of pretraining scripts: each shape gains the same calls, and only those."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.commands.doctor.script import PretrainingScript
from megatron_rl.config import ConfigError

ROOT = Path(__file__).resolve().parents[3]

IMPORTS = """\
# A license.
\"\"\"Pretrain.\"\"\"

import time

START = time.time()

from functools import partial

import torch
from builders import builder
from megatron.core.enums import ModelType
from megatron.training import inprocess_restart, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from provider import model_provider


def batches(sizes):  # "größe" shifts bytes against characters
    return sizes
"""
OLD = (
    IMPORTS
    + """
if __name__ == "__main__":
    # The first stamp of the run.
    ENTRY = time.time()

    setattr(batches, "is_distributed", True)
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)

    args = parse_and_validate_args(
        extra_args_provider=more if has_more else None,
        args_defaults={'größe': 1},
    )
    full_config = pretrain_cfg_container_from_args(args)
    pretrain(full_config,
        batches,
        partial(model_provider, builder),
        ModelType.encoder_or_decoder,
        step,
        store=store,
        get_embedding_ranks=ranks,
    )
"""
)
NEW = OLD.replace(
    "    full_config = pretrain_cfg_container_from_args(args)\n",
    """\
    if has_more:
        model_cfg = gpt_config_from_args(args, model_config_cls=Other)
    else:
        model_cfg = gpt_config_from_args(args)
    full_config = pretrain_cfg_container_from_args(args, model_cfg)
""",
).replace("        partial(model_provider, builder),\n", "")
ADDED = {
    "from megatron_rl import megatron_plugin",
    "rl = megatron_plugin.join()",
    "extra_args_provider=rl.arguments(more if has_more else None),",
    "rl.data(batches),",
    "rl.step(step),",
    "rl.finish()",
}
CALLS = [f"rl.{method}" for method in ("arguments", "data", "finish", "model", "step")]


def changed(text: str) -> str:
    """Return a script with all changes, after checks that hold for every script."""
    after = PretrainingScript(text, Path("script.py")).changed()
    tree = ast.parse(after)
    assert PretrainingScript(after, Path("script.py")).changed() == after
    # Without the plug-in's calls it is the same program.
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    assert {ast.unparse(c.func) for c in calls} >= {"megatron_plugin.join", *CALLS}
    assert ast.dump(Without().visit(tree)) == ast.dump(ast.parse(text))
    return after


class Without(ast.NodeTransformer):
    """Take the plug-in's calls out of a script."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if node.module == "megatron_rl" else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return None if "megatron_plugin.join" in ast.unparse(node) else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if ast.unparse(node) == "rl.finish()" else self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST | None:
        return None if ast.unparse(node.value) == "rl.arguments()" else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node = self.generic_visit(node)  # type: ignore[assignment]
        return node.args[0] if ast.unparse(node.func) in CALLS else node


def added(before: str, after: str) -> set[str]:
    """Return the stripped lines that `before` does not have."""
    return {line.strip() for line in set(after.splitlines()) - set(before.splitlines())}


def test_the_scripts_of_both_releases_gain_seven_lines():
    for text, model in (
        (OLD, "rl.model(partial(model_provider, builder)),"),
        (NEW, "full_config = pretrain_cfg_container_from_args(args, rl.model(model_cfg))"),
    ):
        after = changed(text)
        assert added(text, after) == ADDED | {model}
        lines = after.splitlines()
        place = lines.index("from megatron_rl import megatron_plugin")
        assert lines[place + 1] == "import torch"
        place = lines.index('if __name__ == "__main__":')
        assert lines[place + 1 : place + 3] == [
            "    rl = megatron_plugin.join()",
            "    # The first stamp of the run.",
        ]
        assert lines[-2:] == ["    )", "    rl.finish()"]


def test_other_ways_to_write_the_calls():
    main = OLD.replace('if __name__ == "__main__":', "def main():\n    '''Run.'''")
    by_name = NEW[: NEW.index("    pretrain(full")] + (
        "    pretrain(forward_step_func=step, cfg_container=full_config, model_type=kind,\n"
        "             train_valid_test_dataset_provider=batches)  # all of it\n"
    )
    provider = NEW.replace("(args, model_cfg)", "(args)")
    cases = {
        "model_provider by name": (
            provider.replace("    store=", "    model_provider=lambda *a: build(*a), store="),
            ["model_provider=rl.model(lambda *a: build(*a)),"],
        ),
        "model_provider at the fifth place": (
            provider.replace("        step,\n", "        step, model_provider,\n"),
            ["rl.step(step), rl.model(model_provider),"],
        ),
        "everything by name": (
            by_name,
            ["rl.step(step), cfg", "provider=rl.data(batches))  # all of it\n    rl.finish()\n"],
        ),
        "None and a configuration": (
            NEW.replace("        step,\n", "        step,\n        None,\n"),
            ["        None,\n", "(args, rl.model(model_cfg))"],
        ),
        "a lambda": (
            NEW.replace("        step,\n", "        lambda it, m: m(it),\n"),
            ["rl.step(lambda it, m: m(it)),"],
        ),
        "another name": (
            NEW.replace("restart, pretrain\n", "restart, pretrain as run\n")
            .replace("    pretrain, store", "    wrapped, store")
            .replace("(pretrain)", "(run)")
            .replace("    pretrain(full", "    wrapped(full"),
            ["wrapped(full_config,\n        rl.data(batches),"],
        ),
        "a module's name": (
            NEW.replace("import inprocess_restart, pretrain\n", "import inprocess_restart\n")
            .replace("import torch\n", "import torch\nimport megatron.training as mt\n")
            .replace("(pretrain)\n", "(mt.pretrain)\n"),
            ["rl.data(batches)"],
        ),
        "no extra_args_provider": (
            NEW.replace("        extra_args_provider=more if has_more else None,\n", ""),
            ["        extra_args_provider=rl.arguments(), args_defaults={'größe': 1},\n"],
        ),
        "no argument": (
            re.sub(r"(parse_and_validate_args)\(\n.*?\n    \)", r"\1()", NEW, flags=re.S),
            ["args = parse_and_validate_args(extra_args_provider=rl.arguments())"],
        ),
        "extra_args_provider by place": (
            NEW.replace("        extra_args_provider=more if", "        more if"),
            ["        rl.arguments(more if has_more else None),"],
        ),
        "calls in a function": (
            main + "\n\nif __name__ == '__main__':\n    main()\n",
            ["    '''Run.'''\n    rl = megatron_plugin.join()\n    # The first"],
        ),
        "calls in two functions": (
            main.replace("    args = parse", "    go(store)\n\n\ndef go(store):\n    args = parse")
            + "\n\nif __name__ == '__main__':\n    main()\n",
            ["if __name__ == '__main__':\n    rl = megatron_plugin.join()\n    main()"],
        ),
        "calls in the module": (
            IMPORTS + "\nargs = parse_and_validate_args()\n"
            "pretrain(pretrain_cfg_container_from_args(args), batches, ModelType.x, step, builder)",
            ["\nrl = megatron_plugin.join()\nargs", "step), rl.model(builder))\nrl.finish()\n"],
        ),
        "two runs": (
            NEW + "    pretrain(full_config, batches, ModelType.x, step)\n",
            [", rl.model(model_cfg))", "    )\n    rl.finish()\n    pre", "(step))\n    rl.f"],
        ),
    }  # fmt: skip
    for name, (text, parts) in cases.items():
        assert text != NEW, name
        after = changed(text)
        for part in parts:
            assert part in after, (name, part, after)


def test_names_that_the_script_has_are_left_alone():
    text = NEW.replace("    ENTRY =", "    rl = 3\n    ENTRY =")
    after = PretrainingScript(text, Path("script.py")).changed()
    assert "rl_plugin = megatron_plugin.join()" in after and "rl_plugin.data(batches)" in after
    # A plug-in under a name of the script's own; what it does not call yet is added.
    half = changed(NEW).replace("rl.", "own.").replace("rl = ", "own = ")
    half = half.replace("own = ", "own: Plugin = ")
    half = half.replace("import megatron_plugin", "import megatron_plugin as mp")
    half = half.replace("megatron_plugin.join", "mp.join")
    assert PretrainingScript(half, Path("script.py")).edits == set()
    part = half.replace("own.step(step)", "step").replace("    own.finish()\n", "")
    assert PretrainingScript(part, Path("script.py")).changed() == half


def test_refusals_name_line_and_remedy():
    extra = "        extra_args_provider=more if has_more else None,"
    old = "pretrain(batches, builder, ModelType.x, step, args_defaults={}, extra_args_provider=a)"
    line = NEW[: NEW.index("parse_and_validate_args(")].count("\n") + 1
    cases = {
        "script.py:1: ": "def (",
        "no statement calls megatron.training.pretrain.*training loop of one's own": (
            "def pretrain(model):\n    pass\n\n\npretrain(None)\n"
        ),
        "no statement calls": NEW.replace("    pretrain(", "    code = 1 + pretrain("),
        r":\d+: .*0.17 has none and is not supported": f"{IMPORTS}\n{old}\n",
        f"script.py:{line}: no extra_args_provider here": NEW.replace(extra, "        **more,"),
        r":\d+: no model_provider here": NEW.replace("(args, model_cfg)", "(args)"),
        r":\d+: no train_valid.* here": NEW.replace("    batches,", "    *batches,"),
        r":\d+: no forward_step_func here": NEW.replace("ModelType.enc", "kinds.enc"),
        r":\d+: give this statement a line of its own": NEW.replace(
            "    pretrain(", "    1; pretrain("
        ),
    }
    for message, text in cases.items():
        assert text != NEW, message
        with pytest.raises(ConfigError, match=message):
            PretrainingScript(text, Path("script.py"))


def test_the_command_prints_a_diff_that_patch_applies_and_writes_elsewhere(tmp_path):
    script, written = tmp_path / "pretrain.py", tmp_path / "rl.py"
    script.write_text(NEW)
    done = CliRunner().invoke(app, ["doctor", "--script", str(script), "--write", str(written)])
    assert done.exit_code == 1, done.output
    assert script.read_text() == NEW and written.read_text() == changed(NEW)
    numbers = [int(n) for n in re.findall(r"^line (\d+), \w+: \w+", done.output, re.M)]
    assert numbers == sorted(numbers) and len(numbers) == 7
    lines = NEW.splitlines()
    assert "model_cfg)" in lines[numbers[3] - 1] and "batches" in lines[numbers[4] - 1]
    subprocess.run(
        ["patch", str(script)], input=done.output, text=True, check=True, capture_output=True
    )
    assert script.read_text() == written.read_text()
    again = CliRunner().invoke(app, ["doctor", "--script", str(script)])
    assert (again.exit_code, again.output) == (0, f"{script} has all lines for RL\n")
    for wrong in (["--write", str(written)], ["--script", str(script), "--json"]):
        assert CliRunner().invoke(app, ["doctor", *wrong]).exit_code == 2


def test_the_examples_have_all_lines():
    scripts = [p for p in (ROOT / "examples").glob("*.py") if "megatron_plugin" in p.read_text()]
    assert scripts
    for script in scripts:
        assert PretrainingScript(script.read_text(), script).edits == set(), script
