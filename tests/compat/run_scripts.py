"""Run reproductions, each in a fork of this process: what they import takes the longest.

python -m tests.compat.run_scripts MODULE SCRIPT...     prints SCRIPT, its exit status
"""

import importlib
import os
import runpy
import sys

if __name__ == "__main__":
    importlib.import_module(sys.argv[1])
    for script in sys.argv[2:]:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as e:
                sys.stdout.flush()
                os._exit(int(e.code or 0))
            os._exit(3)
        print("STATUS", script, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
