"""The orchestrator as a process: `python -m megatron_rl.orchestrator SPEC.json`."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

import msgspec
import zmq.asyncio
from tokenizers import Tokenizer

from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.data import load_prompts, read_format
from megatron_rl.metrics.metrics_file import MetricsWriter, read_metrics
from megatron_rl.metrics.run_report import print_report, write_report
from megatron_rl.metrics.sink import RunSink
from megatron_rl.orchestrator.event_loop import Orchestrator
from megatron_rl.orchestrator.meter import Meter
from megatron_rl.orchestrator.spec import Spec
from megatron_rl.orchestrator.state import load_state
from megatron_rl.orchestrator.verification import Verification


def run_orchestrator(spec: Spec) -> None:
    """Run to the end and write the report.

    Signals are left to the roles: the trainer says when the run ends, and a run whose trainer is
    gone ends by itself.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _raise_limit_of_files()
    config = RunConfig.model_validate(spec.config)
    model = Path(spec.model_dir)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    form = read_format(model, config.generation.think_start)
    prompts = load_prompts(config, tokenizer, form)
    state = None
    if spec.checkpoint:
        state = load_state(
            Path(spec.checkpoint), prompts.fingerprint, config.schedule.prompts_per_step
        )
    path = config.output_dir / "metrics.jsonl"
    writer = MetricsWriter(path, resume_step=None if state is None else state.step)
    evaluated = {row["step"] for row in read_metrics(path) if row["kind"] == "eval"}
    sink = RunSink(config, writer, 0 if state is None else state.step)
    meter = Meter(sink, config.roles.world_size, evaluated)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    async def serve() -> m.TrainerDone:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.bind(spec.bind)
        _announce(spec.endpoint_file, socket.getsockopt_string(zmq.LAST_ENDPOINT))
        try:
            async with Verification(config.verifier, prompts.verifiers, decode) as verification:
                orchestrator = Orchestrator(config, prompts, verification, meter, socket, state)
                try:
                    return await orchestrator.run()
                finally:
                    await orchestrator.stop_engines()
        finally:
            socket.close()
            context.term()

    try:
        done = asyncio.run(serve())
    finally:
        sink.close()
    summary = write_report(
        config.output_dir,
        path,
        phases={**spec.phases, **meter.phases()},
        fit_compute=config.fit.compute,
        extra={
            "interrupted": done.interrupted,
            "steps": done.step,
            "aborted_requests": meter.aborted,
            "model": config.model,
        },
    )
    if config.metrics.terminal != "off":
        print_report(summary)


def _raise_limit_of_files() -> None:
    # Shells give 1024. 600 generators and the verifier's workers need more, and a connection
    # beyond the limit would wait in silence.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _announce(path: str, endpoint: str) -> None:
    temporary = f"{path}.tmp"
    Path(temporary).write_text(endpoint)
    os.replace(temporary, path)


def main() -> None:
    """Entry of the process; a failure is printed with its cause and ends with status 1."""
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)
    try:
        run_orchestrator(spec)
    except Exception as e:  # noqa: BLE001 - the process ends here; rank 0 passes the cause on
        traceback.print_exc()
        print(f"megatron_rl orchestrator: {e}", file=sys.stderr, flush=True)
        Path(f"{spec.endpoint_file}.error").write_text(f"{type(e).__name__}: {e}")
        sys.exit(1)
