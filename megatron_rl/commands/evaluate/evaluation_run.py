"""A run without training: the orchestrator and one generator as child processes.

`python -m megatron_rl.commands.evaluate.evaluation_run CONFIG ENDPOINT MODEL` is the generator.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl import launch
from megatron_rl.config import RunConfig
from megatron_rl.data import Prompt
from megatron_rl.orchestrator import RunError
from megatron_rl.orchestrator.child_process import EvaluateOnly, OrchestratorProcess
from megatron_rl.orchestrator.evaluation import EvaluatedSample

MODULE = "megatron_rl.commands.evaluate.evaluation_run"
POLL_SECONDS, GRACE_SECONDS = 0.2, 10.0


def sample_and_verify(
    config: RunConfig,
    model: Path,
    prompts: list[Prompt],
    sampling: dict[str, Any],
    advance: Callable[[int], None],
) -> list[EvaluatedSample]:
    """Sample and verify completions and return them by prompt and number.

    `sampling` has `samples` of each prompt, `temperature` and `seed`; `advance` is called with the
    number of new verdicts.

    Raises:
        RunError: a verifier or the generator failed, or a time-out; with the cause.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the processes as Ctrl-C does
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megatron_rl_")))
        config = _without_training(config, folder, prompts, sampling)
        path = folder / "samples.jsonl"
        path.touch()
        lines = stack.enter_context(path.open("rb"))
        only = EvaluateOnly(
            heldout=[replace(prompt, id=i) for i, prompt in enumerate(prompts)],
            temperature=sampling["temperature"],
            samples_file=str(path),
        )
        python = launch.generator_python(config) or sys.executable
        orchestrator = OrchestratorProcess(config, model, {}, None, only)
        stack.push(orchestrator.kill_on_error)
        (folder / "config.json").write_text(config.model_dump_json())
        arguments = [str(folder / "config.json"), orchestrator.endpoint, str(model)]
        generator = subprocess.Popen([python, "-m", MODULE, *arguments])
        stack.callback(generator.wait)
        stack.callback(generator.kill)
        alive = time.monotonic()
        while orchestrator.ended() is None:
            time.sleep(POLL_SECONDS)
            advance(lines.read().count(b"\n"))
            if generator.poll() is None:
                alive = time.monotonic()
            elif time.monotonic() - alive > GRACE_SECONDS:
                status = generator.returncode
                raise RunError(f"the generator ended with exit status {status}; see its log")
        orchestrator.wait(GRACE_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            generator.wait(config.timeouts.shutdown_seconds)
        lines.seek(0)
        samples = [msgspec.json.decode(line, type=EvaluatedSample) for line in lines]
    return sorted(samples, key=lambda pair: (pair[0].prompt_id, pair[0].index))


def _without_training(
    config: RunConfig, folder: Path, prompts: list[Prompt], sampling: dict[str, Any]
) -> RunConfig:
    """Return the configuration of a run with one engine and its own folder."""
    longest = max([config.generation.max_prompt_tokens, *(len(p.token_ids) for p in prompts)])
    changes: dict[str, dict[str, Any]] = {
        "generation": {"max_prompt_tokens": longest},
        "evaluation": {"samples_per_prompt": sampling["samples"]},
        "roles": {"generator_ranks": config.roles.generator_tensor_parallel},
        "metrics": {"terminal": "off", "wandb": "off", "tensorboard": False},
    }
    sections = {k: getattr(config, k).model_copy(update=v) for k, v in changes.items()}
    return config.model_copy(update={**sections, "output_dir": folder, "seed": sampling["seed"]})


if __name__ == "__main__":
    from megatron_rl.generator.serve import run_generator

    config_file, endpoint, model_dir = sys.argv[1:]
    settings = RunConfig.model_validate_json(Path(config_file).read_text())
    run_generator(settings, 0, 0, endpoint, model_dir)
