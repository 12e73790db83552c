"""`megatron-rl doctor`: whether this machine can run what is installed, and what to do if not.

Every check gives one line: `ok`, `note` (how it is here, and why that is enough), or `fail` with a
remedy. What a check needs to import or start runs in processes of its own, so that a broken package
ends a line and not the report; the generators' interpreter is asked in the same way.
"""

from megatron_rl.commands.doctor.checks import Options, run_checks
from megatron_rl.commands.doctor.result import Result, fail, note, ok

__all__ = ["Options", "Result", "fail", "note", "ok", "run_checks"]
