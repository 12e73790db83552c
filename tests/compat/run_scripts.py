"""Run reproductions without the fixes and with them, each in a fork of this process.

python -m tests.compat.run_scripts MODULE[,MODULE...] [MODULE...] FOLDER SCRIPT...

Prints a row `STATUS SCRIPT unfixed|fixed` with the exit status. Modules of the first list are
imported once; none of those that a fix changes may be among them, so that a fix acts at the import.
Those of the second are imported twice: without the fixes for half of the forks, with them for the
others. The folder has a `sitecustomize.py` that installs the fixes, also in what a script spawns.
"""

import importlib
import os
import runpy
import sys
from collections.abc import Callable
from functools import partial

from megatron_rl.compat import megatron_cpu, megatron_fixes, vllm_fixes

CHANGED = {m for fix in (*megatron_fixes.FIXES, *vllm_fixes.FIXES) for m in fix.changes}


def fork(work: Callable[[], int]) -> int:
    """Return the exit status of a fork that does the work."""
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        status = work()
        sys.stdout.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(script: str) -> int:
    """Run a script to its end and return its exit status."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as e:
        return int(e.code or 0)
    return 3


def reproduce(kind: str, folder: str, modules: list[str], scripts: list[str]) -> int:
    """Print the status of each script, with the fixes if `kind` is "fixed"."""
    if kind == "fixed":
        paths = [folder, os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        runpy.run_path(f"{folder}/sitecustomize.py")
    if any(name.startswith("megatron") for name in modules):
        megatron_cpu.install()
    for name in modules:
        importlib.import_module(name)
    megatron_cpu.install = lambda: None  # what scripts call: it refuses to come after the import
    for script in scripts:
        print("STATUS", script, kind, fork(partial(run, script)), flush=True)
    return 0


if __name__ == "__main__":
    once, twice, folder, *scripts = sys.argv[1:]
    for name in once.split(","):
        importlib.import_module(name)
    assert not (early := CHANGED & sys.modules.keys()), f"imported before the fixes: {early}"
    for kind in ("unfixed", "fixed"):
        modules = [*filter(None, twice.split(","))]
        if fork(partial(reproduce, kind, folder, modules, scripts)):
            sys.exit(f"{kind}: the modules cannot be imported")
