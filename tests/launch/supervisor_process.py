"""A generator rank in its own process, and a stand-in for the process of its engine.

python -m tests.launch.supervisor_process CONFIG PYTHON     rank of the first engine
PYTHON -m megatron_rl.cli generate ...                      `engine`, as the rank starts it
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_rl.config import RunConfig
from megatron_rl.generator.supervisor import EngineRecord, supervise

ADDRESS = "tcp://127.0.0.1:7"


class Store:
    """torchrun's, in which rank 0 has put the orchestrator's address."""

    def __init__(self) -> None:
        self._values = {"orchestrator": ADDRESS.encode()}

    def check(self, keys: list[str]) -> bool:
        return {*keys} <= self._values.keys()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()


def write_python(folder: Path) -> Path:
    """Write the interpreter whose engines take their acts from a file in the folder."""
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable}\n"
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.launch.supervisor_process import engine\n"
        f"engine({str(folder)!r})\n"
    )
    path.chmod(0o755)
    return path


def engine(folder: str) -> None:
    """Act as the file `acts` says, a line for each start: ready, error, forever, works, stubborn.

    Its process id is appended to the file `started`.
    """
    arguments = dict(zip(sys.argv[4::2], sys.argv[5::2], strict=True))
    record = EngineRecord(int(arguments["--record"]), int(arguments["--agent"]))
    record.write()
    started = Path(folder, "started")
    count = len(started.read_text().splitlines()) if started.exists() else 0
    acts = Path(folder, "acts").read_text().splitlines()[count].split()
    with started.open("a") as file:
        file.write(f"{os.getpid()} {Path(arguments['--join']).read_text()}\n")
    for act in acts:
        match act:
            case "ready":
                record.write(ready=True)
            case "error":
                record.write(status=1, error="WeightsError: torn")
                sys.exit(1)
            case "forever":
                while not Path(folder, "stop").exists():
                    time.sleep(0.05)
            case "works":
                while not Path(folder, "stop").exists():
                    record.touch()
                    time.sleep(0.05)
            case "stubborn":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                subprocess.Popen(
                    [sys.executable, "-c", "import os, time; os.setpgid(0, 0); time.sleep(600)"]
                )
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
    record.write(status=0)


if __name__ == "__main__":
    config = RunConfig.model_validate_json(sys.argv[1])
    supervise(config, config.roles.trainer_ranks, Store(), sys.argv[2], os.environ)
