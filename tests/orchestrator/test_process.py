"""The orchestrator's process: what it asks of the host before it serves."""

from __future__ import annotations

import resource
import subprocess
import sys

PROGRAM = """
import resource
from megatron_rl.orchestrator.main import _raise_limit_of_files
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
_raise_limit_of_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_it_may_open_as_many_files_as_the_host_allows() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    assert [int(limit) for limit in done.stdout.split()] == [min(hard, 65_536), hard]
