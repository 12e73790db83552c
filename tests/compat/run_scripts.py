"""Run reproductions without the fixes and with them, each in a fork of this process.

python -m tests.compat.run_scripts MODULE[,MODULE...] FOLDER SCRIPT...

Prints a row `STATUS SCRIPT unfixed|fixed` with the exit status. The modules are imported before the
forks; none of those that a fix changes may be among them, so that a fix acts at the import. The
folder has a `sitecustomize.py` that installs the fixes, also in what a script spawns.
"""

import importlib
import os
import runpy
import sys

from megatron_rl.compat import megatron_fixes, vllm_fixes

CHANGED = {m for fix in (*megatron_fixes.FIXES, *vllm_fixes.FIXES) for m in fix.changes}


def reproduce(script: str, folder: str | None) -> int:
    """Run a script to its end and return its exit status."""
    if folder is not None:
        paths = [folder, os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        runpy.run_path(f"{folder}/sitecustomize.py")
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as e:
        return int(e.code or 0)
    return 3


if __name__ == "__main__":
    modules, fixes, *scripts = sys.argv[1:]
    for name in modules.split(","):
        importlib.import_module(name)
    assert not (early := CHANGED & sys.modules.keys()), f"imported before the fixes: {early}"
    for script in scripts:
        for kind, folder in (("unfixed", None), ("fixed", fixes)):
            sys.stdout.flush()
            if (child := os.fork()) == 0:
                status = reproduce(script, folder)
                sys.stdout.flush()
                os._exit(status)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print("STATUS", script, kind, status, flush=True)
