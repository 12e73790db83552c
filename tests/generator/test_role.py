"""Names and addresses of generators that join a run, and the orchestrator's own address."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.data.prompt_format import save_tiny_tokenizer
from megatron_rl.generator.role import _number, address_of, run_generator
from megatron_rl.models import tiny
from megatron_rl.orchestrator import RunError
from megatron_rl.orchestrator.child_process import OrchestratorProcess


def test_a_run_is_named_by_its_folder_a_file_or_an_address(tmp_path: Path) -> None:
    (tmp_path / "endpoint").touch()
    assert address_of("head:29501") == "tcp://head:29501"
    assert address_of(str(tmp_path)) == tmp_path / "orchestrator.json"
    assert address_of(str(tmp_path / "endpoint")) == tmp_path / "endpoint"
    # The trainer's job may start later than that of the generators.
    assert address_of("runs/later") == Path("runs/later/orchestrator.json")


def test_engines_have_numbers_that_stay_and_differ() -> None:
    names = ["generator-0", "generator-12", "generator-node-7-12", "generator-node-7-13"]
    numbers = [_number(name) for name in names]
    assert numbers[:2] == [0, 12]
    assert len({*numbers}) == 4
    assert numbers == [_number(name) for name in names]
    assert min(numbers[2:]) > 100_000  # no rank's


def test_a_name_of_another_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="--name trainer: .*begins with 'generator-'"):
        run_generator("head:1", "trainer")


class Started:
    """An orchestrator's process, its address and how it listens."""

    def __init__(self, tmp_path: Path, **sections: Any) -> None:
        model = tmp_path / "model"
        if not model.exists():
            tiny.create("tiny_dense", model, save_tiny_tokenizer)
        self.config = RunConfig(
            output_dir=tmp_path / "run", model="tiny_dense", start_checkpoint=model,
            task={"train_prompts": 60, "heldout_prompts": 2}, **sections,
        )  # fmt: skip
        self.process = OrchestratorProcess(self.config, model, {}, None, "node")


def test_the_orchestrators_address_is_in_the_folder_and_local_where_all_generators_are(
    tmp_path: Path,
) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    host = socket.getfqdn()
    for sections, address in (
        ({}, "tcp://127.0.0.1:"),
        ({"roles": {"generator_ranks": 0}}, f"tcp://{host}:"),
        ({"fleet": {"port": port}}, f"tcp://{host}:{port}"),
    ):
        started = Started(tmp_path, **sections)
        try:
            path = started.config.output_dir / "orchestrator.json"
            assert json.loads(path.read_text()) == {"endpoint": started.process.endpoint}
            assert started.process.endpoint.startswith(address)
        finally:
            started.process.kill()
        assert "exit status -9" in str(started.process.ended())
        with pytest.raises(ChildProcessError, match="exit status -9"):  # a restart may go well
            started.process.wait(1)


def test_a_port_that_is_taken_ends_the_run_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"fleet.port is {port}, which another process"):
            Started(tmp_path, fleet={"port": port})


def test_the_command_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", "generate", "--help"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "--join" in done.stdout and "--name" in done.stdout
    assert "--agent" not in done.stdout and "--record" not in done.stdout
