"""Start, watch and end the orchestrator's process, from trainer rank 0."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from megatron_rl.config import RunConfig
from megatron_rl.metrics.terminal import restore_terminal
from megatron_rl.orchestrator.spec import Spec


class OrchestratorFailed(RuntimeError):
    """The orchestrator's process did not come up or did not end well; its own log says why."""


class OrchestratorProcess:
    """The orchestrator as a child of trainer rank 0.

    Args:
        config: the run's configuration.
        model_dir: Hugging Face directory whose tokenizer is used.
        phases: wall seconds of what was before, by phase.
        checkpoint: checkpoint folder to go on from, or None.

    Raises:
        OrchestratorFailed: it ended, or did not bind within `timeouts.startup_seconds`.
    """

    def __init__(
        self, config: RunConfig, model_dir: Path, phases: dict[str, float], checkpoint: Path | None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="megatron_rl_")
        endpoint_file = Path(self._folder.name) / "endpoint"
        one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        spec = Spec(
            config=config.model_dump(mode="json"),
            model_dir=str(model_dir),
            bind="tcp://127.0.0.1:*" if one_node else "tcp://*:*",
            endpoint_file=str(endpoint_file),
            phases=phases,
            checkpoint=str(checkpoint or ""),
        )
        spec_file = Path(self._folder.name) / "spec.json"
        spec_file.write_bytes(msgspec.json.encode(spec))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.orchestrator", str(spec_file)]
        )
        self.endpoint = self._await_endpoint(endpoint_file, config, one_node)

    def _await_endpoint(self, path: Path, config: RunConfig, one_node: bool) -> str:
        deadline = time.monotonic() + config.timeouts.startup_seconds
        while not path.exists():
            if (reason := self.ended()) is not None:
                raise OrchestratorFailed(f"the orchestrator did not start: {reason}")
            if time.monotonic() > deadline:
                raise OrchestratorFailed(
                    "the orchestrator did not bind its socket within timeouts.startup_seconds ="
                    f" {config.timeouts.startup_seconds}"
                )
            time.sleep(0.02)
        endpoint = path.read_text()
        return endpoint if one_node else endpoint.replace("0.0.0.0", os.environ["MASTER_ADDR"])

    def ended(self) -> str | None:
        """None while it runs, else how it ended."""
        status = self._process.poll()
        if status is None:
            return None
        error = Path(self._folder.name) / "endpoint.error"
        cause = f": {error.read_text()}" if error.exists() else ""
        return f"exit status {status}{cause}"

    def wait(self, seconds: float) -> None:
        """Wait for it to end by itself.

        Raises:
            OrchestratorFailed: it failed, or still runs after `seconds`.
        """
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise OrchestratorFailed(f"the orchestrator did not end within {seconds} s") from None
        if status:
            raise OrchestratorFailed(f"the orchestrator failed: {self.ended()}")

    def kill_on_error(self, kind: object, *_: object) -> None:
        """End it now if a `with` block ends by an error (`contextlib.ExitStack.push`)."""
        if kind is not None:
            self.kill()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait(10)
        restore_terminal()
