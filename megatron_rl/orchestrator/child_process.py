"""Start, watch and end the orchestrator's process, from trainer rank 0."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.compat import running_code
from megatron_rl.config import RunConfig
from megatron_rl.data import Prompt
from megatron_rl.orchestrator import RunError


class EvaluateOnly(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluate weights version 0 on these prompts, train nothing (`megatron-rl evaluate`)."""

    heldout: list[Prompt]
    temperature: float
    samples_file: str
    """File for a line of JSON per completion (`evaluation.EvaluatedSample`)."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the file that starts the orchestrator's process."""

    config: dict[str, Any]
    model_dir: str
    """Hugging Face directory of the tokenizer."""
    bind: str
    """Address to bind, `tcp://127.0.0.1:*`."""
    endpoint_file: str
    """Written atomically once the socket is bound; an error goes to `<endpoint_file>.error`."""
    phases: dict[str, float]
    """Wall seconds of the phases before, by name."""
    versions: dict[str, str]
    """Versions of the packages that the trainer imports."""
    checkpoint: str = ""
    """Checkpoint folder to resume from."""
    evaluate_only: EvaluateOnly | None = None
    """None for a run that trains."""


class OrchestratorProcess:
    """The orchestrator as a child process; see `Spec` for the arguments.

    Raises:
        RunError: it ended, or did not bind within `timeouts.startup_seconds`.
    """

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        phases: dict[str, float],
        checkpoint: Path | None,
        evaluate_only: EvaluateOnly | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="megatron_rl_")
        self._endpoint_file = Path(self._folder.name) / "endpoint"
        one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        spec = Spec(
            config=config.model_dump(mode="json"),
            model_dir=str(model_dir),
            bind="tcp://127.0.0.1:*" if one_node else "tcp://*:*",
            endpoint_file=str(self._endpoint_file),
            phases=phases,
            versions=running_code.versions(),
            checkpoint=str(checkpoint or ""),
            evaluate_only=evaluate_only,
        )
        spec_file = Path(self._folder.name) / "spec.json"
        spec_file.write_bytes(msgspec.json.encode(spec))
        command = [sys.executable, "-m", "megatron_rl.orchestrator.main", str(spec_file)]
        self._process = subprocess.Popen(command)
        self.endpoint = self._wait_for_endpoint(config.timeouts.startup_seconds)
        if not one_node:
            self.endpoint = self.endpoint.replace("0.0.0.0", os.environ["MASTER_ADDR"])

    def _wait_for_endpoint(self, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while not self._endpoint_file.exists():
            if (reason := self.ended()) is not None:
                raise RunError(f"the orchestrator did not start: {reason}")
            if time.monotonic() > deadline:
                raise RunError(
                    "the orchestrator did not bind its socket within timeouts.startup_seconds ="
                    f" {seconds}"
                )
            time.sleep(0.02)
        return self._endpoint_file.read_text()

    def ended(self) -> str | None:
        """Return None while it runs, else exit status and cause."""
        if (status := self._process.poll()) is None:
            return None
        error = Path(f"{self._endpoint_file}.error")
        return f"exit status {status}" + (f": {error.read_text()}" if error.exists() else "")

    def wait(self, seconds: float) -> None:
        """Wait for its own end.

        Raises:
            RunError: it failed, or still runs after `seconds`.
        """
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RunError(f"the orchestrator did not end within {seconds} s") from None
        if status:
            raise RunError(f"the orchestrator failed: {self.ended()}")

    def kill_on_error(self, kind: object, *_: object) -> None:
        """Kill it if a `with` block ends with an error (`contextlib.ExitStack.push`)."""
        if kind is not None:
            self.kill()

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait(10)
