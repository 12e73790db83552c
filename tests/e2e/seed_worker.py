"""A rank of a run, in a fork that has imported Megatron: torchrun would start it in new processes.

Started by `test_same_seed.py`, two ranks for each line of `runs.json`: trainer and generator.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path

SECONDS = 400.0


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} was not written within {SECONDS} s"
        time.sleep(0.05)


def main(rank: int, folder: Path) -> None:
    from torch.distributed import TCPStore

    from megatron_rl import cli
    from megatron_rl.files import replace_file

    number, own = divmod(rank, 2)
    arguments: list[str] = json.loads((folder / "runs.json").read_text())[number]
    port, ended = folder / f"port{number}", folder / f"ended{number}"
    if own == 0:  # has the store, as torchrun's agent
        seconds = timedelta(seconds=SECONDS)
        store = TCPStore("127.0.0.1", 0, None, True, seconds, wait_for_workers=False)
        replace_file(port, f"{store.port}")
    wait_for(port)
    os.environ |= {
        "RANK": f"{own}", "WORLD_SIZE": "2", "LOCAL_RANK": f"{own}", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port.read_text(),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": f"run {number}",
    }  # fmt: skip
    try:
        cli.main(arguments)
    except SystemExit as e:
        if e.code:
            raise
    if own == 1:
        ended.touch()
    else:
        wait_for(ended)
