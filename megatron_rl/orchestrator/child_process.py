"""Start, watch and end the orchestrator's process, from trainer rank 0."""

import json
import os
import socket
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
from megatron_rl.files import replace_file
from megatron_rl.orchestrator import RunError
from megatron_rl.run_lock import ENDPOINT_FILE

FINAL_STATUS = 2  # exit status after an error that another start would only meet again


class EvaluateOnly(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluate weights version 0 on these prompts, train nothing (`megatron-rl evaluate`)."""

    heldout: list[Prompt]
    temperature: float
    samples_file: str  # file for a line of JSON per completion (`evaluation.EvaluatedSample`)


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the file that starts the orchestrator's process."""

    config: dict[str, Any]
    model_dir: str  # Hugging Face directory of the tokenizer
    trainer_node: str  # node whose processes see every trainer rank's store; empty if no node does
    bind: str  # address to bind, `tcp://127.0.0.1:*`
    endpoint_file: str  # written once the socket is bound; errors go to `<endpoint_file>.error`
    phases: dict[str, float]  # wall seconds of the phases before, by name
    versions: dict[str, str]  # versions of the packages that the trainer imports
    checkpoint: str = ""  # checkpoint folder to resume from
    evaluate_only: EvaluateOnly | None = None  # None for a run that trains


class OrchestratorProcess:
    """The orchestrator as a child process; see `Spec` for the arguments.

    `node` is that of this process. Other nodes reach it if there are several under torchrun, with
    `fleet.port`, and where all generators join by themselves. Every method raises `RunError` after
    an error that another start would only meet again.

    Raises:
        ChildProcessError: it ended, or did not bind within `timeouts.startup_seconds`.
    """

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        phases: dict[str, float],
        checkpoint: Path | None,
        node: str,
        evaluate_only: EvaluateOnly | None = None,
    ) -> None:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        # The next start removes that of a killed run (`files.left_in`).
        self._folder = tempfile.TemporaryDirectory(prefix=".start.tmp-", dir=config.output_dir)
        self._endpoint_file = Path(self._folder.name) / "endpoint"
        one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        here, port = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), config.fleet.port
        is_local = one_node and not port and config.roles.generator_ranks > 0
        spec = Spec(
            config=config.model_dump(mode="json"),
            model_dir=str(model_dir.absolute() if model_dir.is_dir() else model_dir),
            trainer_node=node if config.roles.trainer_ranks <= here else "",
            bind=f"tcp://{'127.0.0.1' if is_local else '*'}:{port or '*'}",
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
        bound = self._wait_for_endpoint(config.timeouts.startup_seconds)
        host = socket.getfqdn() if one_node else os.environ["MASTER_ADDR"]
        self.endpoint = bound.replace("0.0.0.0", host)
        self.endpoint_file = config.output_dir / ENDPOINT_FILE  # for `megatron-rl generate --join`
        replace_file(self.endpoint_file, json.dumps({"endpoint": self.endpoint}))

    def _wait_for_endpoint(self, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while not self._endpoint_file.exists():
            if (reason := self.ended()) is not None:
                raise ChildProcessError(f"the orchestrator did not start: {reason}")
            if time.monotonic() > deadline:
                raise ChildProcessError(
                    "the orchestrator did not bind its socket within timeouts.startup_seconds ="
                    f" {seconds}"
                )
            time.sleep(0.02)
        return self._endpoint_file.read_text()

    def ended(self) -> str | None:
        """Return None while it runs, else exit status and cause.

        Raises:
            RunError: it ended by an error that another start would only meet again.
        """
        if (status := self._process.poll()) is None:
            return None
        error = Path(f"{self._endpoint_file}.error")
        text = f"exit status {status}" + (f": {error.read_text()}" if error.exists() else "")
        if status == FINAL_STATUS:
            raise RunError(f"the orchestrator failed: {text}")
        return text

    def wait(self, seconds: float) -> None:
        """Wait for its own end; `ChildProcessError`: it failed, or still runs after `seconds`.

        Raises:
            RunError: it failed by an error that another start would only meet again.
            ChildProcessError: it failed otherwise, or still runs after `seconds`.
        """
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ChildProcessError(f"the orchestrator did not end within {seconds} s") from None
        if status:
            raise ChildProcessError(f"the orchestrator failed: {self.ended()}")
        self.endpoint_file.unlink(missing_ok=True)  # others may get the port

    def kill_on_error(self, kind: object, *_: object) -> None:
        """Kill it if a `with` block ends with an error (`contextlib.ExitStack.push`)."""
        if kind is not None:
            self.kill()

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait(10)
