"""What a result was measured on: processor and commit."""

import subprocess
from pathlib import Path


def processor() -> str:
    """Return the name of this machine's processor and the number of its cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}"


def commit() -> str:
    """Return the commit of the tree that runs."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
