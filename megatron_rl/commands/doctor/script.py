"""`megatron-rl doctor --script FILE`: the lines by which a pretraining script gains RL.

The script is parsed, not run: text is inserted where it calls Megatron, known by its imports.
"""

import ast
import difflib
import re
import sys
from collections import defaultdict
from itertools import takewhile
from pathlib import Path

from megatron_rl.config import ConfigError

JOIN, MEGATRON = "megatron_rl.megatron_plugin.join", "megatron.training."
PARSER, CONTAINER = "parse_and_validate_args", "pretrain_cfg_container_from_args"
EXTRA, MODEL, CONFIG = "extra_args_provider", "model_provider", "model_cfg"
DATA, STEP = "train_valid_test_dataset_provider", "forward_step_func"
PARAMETERS = {  # place of the `ModelType` -> first parameters of Megatron's `pretrain`
    3: ("cfg_container", DATA, MODEL, "model_type", STEP),  # Megatron-Core 0.18
    2: ("cfg_container", DATA, "model_type", STEP, MODEL),  # 0.19
}
REASONS = {
    "import": "the plug-in; it comes before Megatron, which it lets run on a machine without CUDA",
    "join": "finds this rank's role; a generator rank serves here and does not return",
    "arguments": "adds --rl-config and --rl-set to Megatron's and the script's own arguments",
    "model": "takes the model that Megatron builds from this: its weights go to the generators",
    "data": "with --rl-config, the completions of the run take the place of the datasets",
    "step": "with --rl-config, the loss of the run takes the place of the script's",
    "finish": "publishes the last weights, and waits for the last evaluation and the report",
}


class PretrainingScript:
    """A parsed script, and the edits by which it gains RL: none if it calls the whole plug-in.

    Raises:
        ConfigError: it does not parse, or does not call Megatron in a way that can be changed here.
    """

    def __init__(self, text: str, path: Path) -> None:
        self.edits: set[tuple[int, int, str, str]] = set()  # line from 1, byte in it, text, part
        self._path = path
        self._lines = [*(line + b"\n" for line in text.encode().splitlines()), b""]
        try:
            self._tree = ast.parse(text)
        except SyntaxError as e:
            raise ConfigError(f"{path}:{e.lineno}: {e.msg}: correct the script first") from e
        nodes = list(ast.walk(self._tree))
        self._rl = "rl_plugin" if "rl" in {getattr(node, "id", "") for node in nodes} else "rl"
        self._names: dict[str, str] = {}  # bound name -> what it is imported from
        self._calls: dict[str, list[ast.Call]] = defaultdict(list)
        for node in nodes:
            self._bind(node)
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            self._calls[self._key(call.func)].append(call)
        self._statements = {n.value: n for n in nodes if isinstance(n, ast.Expr | ast.Assign)}
        self._plan()

    def changed(self) -> str:
        """Return the source with all edits."""
        lines = list(self._lines)
        for line, at, text, _ in sorted(self.edits, reverse=True):
            lines[line - 1] = lines[line - 1][:at] + text.encode() + lines[line - 1][at:]
        return b"".join(lines).decode()

    def _bind(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names=aliases):
                self._names |= {a.asname: a.name for a in aliases if a.asname}
            case ast.ImportFrom(module=module, names=aliases):
                self._names |= {a.asname or a.name: f"{module}.{a.name}" for a in aliases}
            case ast.Assign(value=ast.Call() as call) | ast.AnnAssign(value=ast.Call() as call):
                name = re.findall(r"\w+", ast.unparse(node))[0]
                if self._key(call.func) == JOIN:
                    self._rl = name
                elif "pretrain" in map(self._key, call.args):  # for in-process restarts
                    self._names[name] = f"{MEGATRON}pretrain"
                    self._calls["wrap"].append(call)

    def _key(self, node: ast.AST) -> str:
        """Return the dotted name of an expression; of one in Megatron's training, the last part."""
        root, *rest = ast.unparse(node).split(".")
        name = ".".join([self._names.get(root, root if rest else f".{root}"), *rest])
        return name.rpartition(".")[2] if name.startswith(MEGATRON) else name

    def _plan(self) -> None:
        parsers, containers = self._calls[PARSER], self._calls[CONTAINER]
        runs = [call for call in self._calls["pretrain"] if call in self._statements]
        if not runs:
            raise ConfigError(
                f"{self._path}: no statement calls {MEGATRON}pretrain, of which the plug-in wraps"
                " datasets, model and forward step: a training loop of one's own must become one"
            )
        if not parsers:
            missing = f"call of {PARSER} (Megatron-LM up to 0.17 has none and is not supported)"
            self._wrap(runs[0], {}, missing, "arguments")
        for call in parsers:
            given, code = self._given(call, EXTRA), f"{EXTRA}={self._rl}.arguments()"
            edit = (call.end_lineno or 0, (call.end_col_offset or 0) - 1, code, "arguments")
            for first in call.keywords[:1]:
                edit = (first.lineno, first.col_offset, f"{code}, ", "arguments")
            if call.args or given.keys() & {EXTRA, "**"}:
                self._wrap(call, given, EXTRA, "arguments")
            elif not self._calls[f"{self._rl}.arguments"]:
                self.edits.add(edit)
        for call in runs:
            self._plan_run(call, containers)
        if not self._calls[JOIN]:
            self._plan_join(set(parsers + containers + runs + self._calls["wrap"]))

    def _plan_run(self, run: ast.Call, containers: list[ast.Call]) -> None:
        """Wrap the arguments of a call of `pretrain`, and end the run after it."""
        types = (i for i, value in enumerate(run.args) if "ModelType." in ast.unparse(value))
        given = self._given(run, *PARAMETERS.get(next(types, 0), PARAMETERS[2][:2]))
        models = [(given, MODEL), *((self._given(c, "args", CONFIG), CONFIG) for c in containers)]
        shown = [(a, name) for a, name in models if name in a and ast.unparse(a[name]) != "None"]
        for arguments, name in shown or [({}, MODEL)]:
            self._wrap(run, arguments, name, "model")
        self._wrap(run, given, DATA, "data")
        self._wrap(run, given, STEP, "step")
        if not self._calls[f"{self._rl}.finish"]:
            like, code = self._statements[run], f"{self._rl}.finish()"
            self._insert((like.end_lineno or 0) + 1, like, code, "finish")

    def _plan_join(self, calls: set[ast.AST]) -> None:
        """Import the plug-in, and join before all of these calls."""
        standard, body = {"__future__", *sys.stdlib_module_names}, self._tree.body
        holders = [s for s in body if not calls.isdisjoint(ast.walk(s))]
        imports = [s for s in body if isinstance(s, ast.Import | ast.ImportFrom)]
        others = [s for s in imports if re.findall(r"\w+", ast.unparse(s))[1] not in standard]
        first = [*others, *holders][0]
        self._insert(first.lineno, first, "from megatron_rl import megatron_plugin", "import")
        mains = [s for s in body if isinstance(s, ast.If) and "__main__" in ast.unparse(s.test)]
        first = (mains if len(holders) > 1 and mains else holders)[0]
        line = first.lineno
        if isinstance(first, ast.FunctionDef):
            documented, first = ast.get_docstring(first) is not None, first.body[0]
            line = (first.end_lineno or 0) + 1 if documented else first.lineno
        elif first in mains:
            line, first = line + 1, mains[0].body[0]
        self._insert(line, first, f"{self._rl} = megatron_plugin.join()", "join")

    def _insert(self, line: int, like: ast.stmt, code: str, part: str) -> None:
        """Insert a line with the indentation of a statement."""
        indent = self._lines[like.lineno - 1][: like.col_offset].decode()
        if indent.strip():
            raise ConfigError(f"{self._path}:{line}: give this statement a line of its own")
        self.edits.add((line, 0, f"{indent}{code}\n", part))

    def _wrap(self, call: ast.Call, given: dict[str, ast.expr], name: str, method: str) -> None:
        """Put an argument in a method of the plug-in, unless the script calls this method."""
        function = f"{self._rl}.{method}"
        if self._calls[function]:
            return
        if name not in given:
            raise ConfigError(
                f"{self._path}:{call.lineno}: no {name} here: write it out, not by * or **, or use"
                f" {function}(...) in the file that has it"
            )
        value = given[name]
        self.edits.add((value.lineno, value.col_offset, f"{function}(", method))
        self.edits.add((value.end_lineno or 0, value.end_col_offset or 0, ")", ""))

    def _given(self, call: ast.Call, *parameters: str) -> dict[str, ast.expr]:
        """Return parameter -> argument, up to a `*`."""
        shown = takewhile(lambda argument: not isinstance(argument, ast.Starred), call.args)
        named = {keyword.arg or "**": keyword.value for keyword in call.keywords}
        return dict(zip(parameters, shown, strict=False)) | named


def report(path: Path, write: Path | None) -> bool:
    """Print a diff and the reasons, and `write` the changed script; True if it has all lines."""
    text = path.read_bytes().decode("utf-8-sig")
    script = PretrainingScript(text, path)
    changed = script.changed()
    assert not PretrainingScript(changed, path).edits
    if write is not None:
        write.write_bytes(changed.encode())
    sides, name = (text.splitlines(), changed.splitlines()), str(path)
    diff = "\n".join(difflib.unified_diff(*sides, name, name, n=2, lineterm=""))
    print(diff or f"{path} has all lines for RL")
    for line, _, _, part in sorted(script.edits):
        if part:
            print(f"line {line}, {part}: {REASONS[part]}")
    return not script.edits
