"""The store process of a node, kept running by one of the node's generators.

Generators on the trainer's node, or with `weights.directory`, read what the trainer's ranks write.
On any other node, one store takes each version for all of them.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

from megatron_rl.config import RunConfig
from megatron_rl.weights.manifest import WeightsError, checksum
from megatron_rl.weights.store import FOLDER_PREFIX, SHARED_MEMORY, hold, node_name, remove_unused
from megatron_rl.weights.store_process import OTHER_LAYOUT, StoreSpec, start

CHECK_SECONDS = 0.2  # between two calls of `StoreKeeper.check`
RESTARTS, RESTARTS_WITHIN = 3, 600.0
"""Ends of the process within so many seconds after which it is not started again."""
_EXIT_SECONDS = 2.0  # to end by the orchestrator's Stop: it ignores SIGTERM, as its parent


def sees_trainer_stores(config: RunConfig, trainer_node: str) -> bool:
    """Return True if generators of this node can read the files of all trainer ranks.

    All of these are on this node if it is the `trainer_node` (`Welcome.trainer_node`).
    """
    return config.weights.directory is not None or trainer_node == node_name()


def store_spec(config: RunConfig, node: str, endpoint: str | Path) -> StoreSpec:
    """Return the arguments of a node's store process: the same over restarts of the trainer."""
    name = checksum(f"{config.output_dir.absolute()} {node}".encode())[:16]
    return StoreSpec(
        name=f"store-{node}",
        node=node,
        endpoint=str(endpoint),
        folder=str(SHARED_MEMORY / f"{FOLDER_PREFIX}store_{name}"),
        transfer_seconds=config.timeouts.transfer_seconds,
        peer_seconds=config.timeouts.peer_seconds,
        shutdown_seconds=config.timeouts.shutdown_seconds,
        rejoin_seconds=config.timeouts.rejoin_seconds,
    )


class StoreKeeper:
    """One for each generator of a node, with one `spec`; that with the lock has the process."""

    def __init__(self, spec: StoreSpec) -> None:
        self._spec, self._folder = spec, Path(spec.folder)
        remove_unused(self._folder.parent, FOLDER_PREFIX)
        self._user = hold(self._folder)
        self._lock = (self._folder / "keeper").open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        self._ends: list[float] = []
        self.check()

    def check(self) -> None:
        """Start the process if no generator has it, or it was killed; WeightsError: it failed."""
        if self._process is None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        elif not (status := self._process.poll()):  # runs, or was stopped by the orchestrator
            return
        elif status != OTHER_LAYOUT:
            now = time.monotonic()
            self._ends = [end for end in self._ends if now - end < RESTARTS_WITHIN] + [now]
            if status > 0 or len(self._ends) > RESTARTS:
                raise WeightsError(
                    f"the store process {self._spec.name} ended with exit status {status},"
                    f" {RESTARTS} restarts within {RESTARTS_WITHIN:g} s at most: the log of this"
                    " node has the cause (a signal's number, negative, if it was killed: memory of"
                    " the node?)"
                )
            print(
                f"megatron_rl: {self._spec.name} was killed by signal {-status}; it is started"
                f" again ({len(self._ends)} of {RESTARTS})",
                file=sys.stderr,
                flush=True,
            )
        self._process = start(self._spec)

    def close(self) -> None:
        """End the process, if it is this generator's; the last generator removes the folder."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS)
            self._process.kill()
            self._process.wait()
        self._lock.close()
        os.close(self._user)
        remove_unused(self._folder.parent, self._folder.name)
