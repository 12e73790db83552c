"""Two processes, of which one reads the other's memory through NIXL.

python -m megatron_rl.commands.doctor.read_probe COMMAND...   starts COMMAND LINE, which reads it
python -m megatron_rl.commands.doctor.read_probe LINE         reads it, prints bytes per second
"""

import json
import os
import subprocess
import sys
import time

import numpy as np

from megatron_rl.weights.nixl import Agent

MARK = "MEGATRON_RL_READ "
NUM_BYTES = 64 * 2**20
SECONDS = 30.0  # time limit of the read


def _data() -> np.ndarray:
    return np.arange(NUM_BYTES // 8, dtype=np.int64).view(np.uint8)


def serve(command: list[str]) -> int:
    """Let a command, to which a line is appended, read this process; return its exit status."""
    agent, data = Agent(f"doctor-source-{os.getpid()}"), _data()
    agent.register([data])
    line = json.dumps([agent.metadata([data]).hex(), data.ctypes.data])
    with subprocess.Popen([*command, line]) as reader:
        while reader.poll() is None:
            agent.progress()
            time.sleep(0.001)
    return reader.returncode


def read(line: str) -> float:
    """Read the source of this line; return bytes per second.

    Raises:
        TimeoutError: no answer within `SECONDS`.
        ValueError: other bytes than the source has.
    """
    metadata, address = json.loads(line)
    agent, buffer = Agent(f"doctor-reader-{os.getpid()}"), np.zeros(NUM_BYTES, dtype=np.uint8)
    agent.register([buffer])
    handle = agent.read(agent.connect(bytes.fromhex(metadata)), [(address, buffer)])
    started = time.monotonic()
    while not agent.done(handle):
        if time.monotonic() - started > SECONDS:
            raise TimeoutError(f"a one-sided read within this node took more than {SECONDS:g} s")
        time.sleep(0.0005)
    seconds = time.monotonic() - started
    if not np.array_equal(buffer, _data()):
        raise ValueError("a one-sided read brought other bytes than the source has")
    return NUM_BYTES / seconds


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(serve(sys.argv[1:]))
    print(MARK + json.dumps(read(sys.argv[1])))
