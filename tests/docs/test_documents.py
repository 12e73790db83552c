"""README, docs and examples: their commands work, and every name in them exists.

Commands are the lines of shell blocks, and the indented lines in the heads of examples/. Those
that take seconds run here. Of all others the subcommand, the options and the configuration keys
are checked; the tests of each command run them.
"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path

import typer
from typer.testing import CliRunner

from megatron_rl import cli
from megatron_rl.config import RunConfig, describe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *ROOT.glob("patches/*.md"), *sorted(ROOT.glob("docs/*.md"))]
EXAMPLES = [p for p in (ROOT / "examples").rglob("*") if p.suffix in (".sh", ".yaml", ".py")]
GIT_FILES = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
FILES = subprocess.check_output(GIT_FILES, cwd=ROOT, text=True).split()
FILES = [path for path in FILES if (ROOT / path).exists()]
FOLDERS = "megatron_rl|tests|docs|examples|tools|benchmarks|docker|patches|scripts"
ENDINGS = re.compile(r"\.(py|sh|md|ya?ml|toml|jsonl?|csv|lock|txt|h|cpp|cu|png|safetensors)$")
KEYS = {key for key, *_ in describe()}
COMMAND = re.compile(r"([A-Z_]+=\S+ )*(megatron-rl|torchrun|python|bash|make|sbatch)( |$)")
RUN = re.compile(
    r"megatron-rl (fit|compare|forecast|recipes|config|doctor --quick)( |$)|DRY_RUN=1 "
    r"|.* --(plan|dry-run)( |$)|python tools/fit_sigmoid"
)


def commands(path: Path) -> Iterator[str]:
    """Yield a file's command lines without comments, continued lines joined."""
    text = path.read_text().replace("\\\n", " ")
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.M | re.S))
    else:
        text = "\n".join(re.findall(r"^(?:#   |    )(\w.*)", text, re.M))
    for line in text.splitlines():
        command = re.sub(r"\s+#.*", "", line).strip()
        if COMMAND.match(command):
            yield command


def missing_part(command: str) -> str | None:
    """Return the first part of a command that does not exist; None if all parts exist."""
    words = [w for w in shlex.split(command) if not re.match(r"[A-Z_]+=", w)]
    scripts = [w for w in words if re.match(r"(examples|tools)/.*\.(sh|py)$", w)]
    if scripts and not is_file(scripts[0]):
        return scripts[0]
    rest = words[words.index(scripts[0]) + 1 :] if scripts else words[1:]
    if words[0] == "make" and f"\n{words[1]}:" not in (ROOT / "Makefile").read_text():
        return f"target {words[1]}"
    if scripts and words[0] == "python":
        shown = subprocess.check_output([sys.executable, ROOT / scripts[0], "--help"], text=True)
        return next((w for w in rest if w.startswith("--") and w not in shown), None)
    if "megatron_rl.cli" in words:
        rest = words[words.index("megatron_rl.cli") + 1 :]
    elif scripts and scripts[0].endswith(".sh"):
        rest = ["train", *rest]
    elif words[0] != "megatron-rl":
        return None
    node = typer.main.get_group(cli.app)
    node.commands |= cli._others()
    while rest and hasattr(node, "commands") and not rest[0].startswith("-"):
        if rest[0] not in node.commands:
            return f"command {rest[0]}"
        node, rest = node.commands[rest[0]], rest[1:]
    options = {word.split("=")[0] for word in rest if word.startswith("--")} - {"--help"}
    options -= {option for p in node.params for option in (*p.opts, *p.secondary_opts)}
    if node.context_settings.get("ignore_unknown_options"):
        options -= {option for option in options if is_key(option.removeprefix("--"))}
    return next(iter(options), None)


def is_key(name: str) -> bool:
    """Return True for a configuration key, a section, or a pattern (`roles.generator_*`)."""
    name = re.sub(r"^(task|tasks\.[^.]+)(?=\.|$)", "tasks.<name>", name)
    return any(fnmatchcase(key, name) or key.startswith(f"{name}.") for key in KEYS)


def is_file(name: str) -> bool:
    """Return True if a file or folder has this path or pattern, or a path that ends with it."""
    patterns = (name, f"{name}/*", f"*/{name}")
    return any(fnmatchcase(file, pattern) for file in FILES for pattern in patterns)


def is_defined(name: str) -> bool:
    """Return True for the dotted name of a module, or of a word in a module's file."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        for file in ("/".join(parts[:n]) + end for end in (".py", "/__init__.py")):
            if file in FILES:
                return n == len(parts) or parts[n] in re.findall(r"\w+", (ROOT / file).read_text())
    return False


def wrong_names(text: str) -> Iterator[str]:
    """Yield the files, modules, keys and commands of a page that do not exist."""
    paths = re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./*-]*\w)", text)
    yield from (path for path in paths if not is_file(path))
    names = re.findall(r"(?<![\w/])(megatron_rl(?:\.[A-Za-z_]\w*)+)(?!/|\w)", text)
    for module, imported in re.findall(r"from (megatron_rl[\w.]*) import ([\w, ]+)", text):
        names += [f"{module}.{name}" for name in imported.split(", ")]
    yield from (name for name in names if not is_defined(name))
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S)):
        if code.startswith("megatron-rl ") and (missing := missing_part(code)):
            yield f"{code}: {missing}"
        for name in re.findall(r"(?<![\w/.-])(?:--)?([a-z_]+(?:[./][\w*<>-]+)+)(?![/(])", code):
            top = re.split("[./]", name)[0]
            if "/" in name and ENDINGS.search(name):
                known = is_file(name) or "<" in name or top in ("runs", "data")
            elif "/" in name or ENDINGS.search(name):
                known = True
            else:
                ours = (ROOT / "megatron_rl" / top).is_dir() or top in RunConfig.model_fields
                known = not ours or is_key(name) or is_defined(f"megatron_rl.{name}")
            if not known:
                yield name


def write_inputs(folder: Path) -> None:
    """Write what the commands read: the checkout's files, a configuration, points and two runs."""
    for name in ("examples", "tools"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "my_run.yaml").write_text((ROOT / "examples/scalerl_tiny.yaml").read_text())
    rates = {c: 0.395 + 0.305 / (1 + (2000 / c) ** 1.1) for c in range(500, 16_001, 500)}
    points = "".join(f"{compute},{rate:.4f}\n" for compute, rate in rates.items())
    (folder / "points.csv").write_text(f"gpu_hours,pass_rate\n{points}")
    for name, gain in (("mine", 0.0), ("other", 0.02)):
        (folder / "runs" / name).mkdir(parents=True)
        with (folder / "runs" / name / "metrics.jsonl").open("w") as file:
            for c, rate in {0: 0.395, **rates}.items():
                row = {"kind": "eval", "step": c, "compute_device_hours": c}
                file.write(json.dumps({**row, "pass_rate": rate + gain * (c > 0)}) + "\n")


def failure(command: str, folder: Path) -> str | None:
    """Run a command in a folder; return the output of one that failed.

    `megatron-rl` runs in this process, which has imported it; all others are bash's.
    """
    if command.startswith("megatron-rl "):
        with contextlib.chdir(folder):
            words = [glob(word) or [word] for word in shlex.split(command)[1:]]
            result = CliRunner().invoke(cli.app, [part for parts in words for part in parts])
        return f"{result.output}{result.exception!r}" if result.exit_code else None
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=folder, timeout=250, text=True,
        capture_output=True, env={**os.environ, "PATH": path},
    )  # fmt: skip
    return done.stdout + done.stderr if done.returncode else None


def test_the_installed_command_runs() -> None:
    done = subprocess.run([Path(sys.executable).with_name("megatron-rl"), "recipes"], timeout=120)
    assert done.returncode == 0


def test_commands_run_or_name_what_exists(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    shown = {command: path.name for path in [*PAGES, *EXAMPLES] for command in commands(path)}
    problems = []
    for command, file in shown.items():
        problem = missing_part(command)
        if problem is None and RUN.match(command):
            problem = failure(command, tmp_path)
        if problem:
            problems.append(f"{file}: {command}: {problem[-3000:]}")
    assert not problems, "\n".join(problems)
    assert len(shown) > 40
    assert sum(bool(RUN.match(command)) for command in shown) > 12


def test_files_modules_keys_and_commands_in_the_text_exist() -> None:
    wrong = [f"{page.name}: {name}" for page in PAGES for name in wrong_names(page.read_text())]
    assert not wrong, "\n".join(wrong)


def test_the_site_builds_without_warnings_and_the_links_of_the_readme_exist(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text())
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]


def test_names_that_do_not_exist_are_reported() -> None:
    right = "`schedule.steps` `--algorithm.loss gspo` `roles.*` `megatron-rl fit --r0 1` docs/*.md"
    wrong = {"schedule.stepz", "algorithm.los", "megatron_rl.foo", "policy/a.py", "models.NOPE"}
    assert not list(wrong_names(right))
    assert {*wrong_names(" ".join(f"`{name}`" for name in wrong))} == wrong
    for command in ("train --schedule.stepz 4", "fly", "fit --r9 1"):
        assert missing_part(f"megatron-rl {command}")
