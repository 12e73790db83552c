"""The orchestrator as a process: `python -m megatron_rl.orchestrator.main SPEC.json`."""

import asyncio
import errno
import resource
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from tokenizers import Tokenizer

from megatron_rl import messages as m
from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.data import PromptSet, load_prompts, read_format
from megatron_rl.data.question import DataError
from megatron_rl.files import naming_full_disk, replace_file, report_failure
from megatron_rl.metrics.metrics_file import MetricsWriter, read_metrics
from megatron_rl.metrics.run_report import PAGES_SECONDS, report_lines, write_pages, write_report
from megatron_rl.metrics.sink import RunSink
from megatron_rl.metrics.terminal import print_table
from megatron_rl.orchestrator import RunError
from megatron_rl.orchestrator.child_process import FINAL_STATUS, Spec
from megatron_rl.orchestrator.event_loop import Orchestrator
from megatron_rl.orchestrator.recording import Recorder
from megatron_rl.orchestrator.run_metrics import RunMetrics
from megatron_rl.orchestrator.state import load_state
from megatron_rl.orchestrator.verification import Verification
from megatron_rl.rewards import VerifierError

# Another start would only meet them again.
FINAL_ERRORS = (ConfigError, DataError, RunError, VerifierError)
PORT_SECONDS = 5.0  # wait for `fleet.port`, which a killed trainer's orchestrator may have briefly


def _raise_limit_of_files() -> None:
    # Shells give 1024 files. 600 generators and the verifier's workers need more, and a connection
    # beyond the limit would wait without an error.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))


def _bind(socket: zmq.asyncio.Socket, address: str, port: int) -> str:
    deadline = time.monotonic() + PORT_SECONDS
    while True:
        try:
            socket.bind(address)
        except zmq.ZMQError as e:
            if not port or e.errno != errno.EADDRINUSE:
                raise
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"fleet.port is {port}, which another process of this host has: choose another"
                    " port, or 0 for any free one"
                ) from e
            time.sleep(0.2)
        else:
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def run_orchestrator(spec: Spec) -> None:
    """Run to the end and write the report.

    Signals are ignored: the trainer decides when the run ends, and without it this process ends.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _raise_limit_of_files()
    config = RunConfig.model_validate(spec.config)
    model = Path(spec.model_dir)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    if (only := spec.evaluate_only) is not None:
        prompts = PromptSet([], only.heldout, "")
    else:
        prompts = load_prompts(config, tokenizer, read_format(model, config.generation.think_start))
    state, step = None, None
    if spec.checkpoint:
        per_step, sets = config.schedule.prompts_per_step, prompts.set_fingerprints
        state = load_state(Path(spec.checkpoint), prompts.fingerprint, per_step, sets)
        step = state.step
    path = config.output_dir / "metrics.jsonl"
    sink = RunSink(config, MetricsWriter(path, resume_step=step), step or 0)
    metrics = RunMetrics(sink, config.roles, read_metrics(path))
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    verification = Verification(config.verifier, prompts.verifiers, decode)
    metrics.recorder = Recorder(config, None if only else decode, step)

    async def serve() -> m.TrainerDone:
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 2000
            socket.set_hwm(0)
            bound = _bind(socket, spec.bind, config.fleet.port)
            replace_file(Path(spec.endpoint_file), bound)
            async with verification:
                loop = Orchestrator(
                    config, prompts, verification, metrics, socket, state, only,
                    model_dir=spec.model_dir, trainer_node=spec.trainer_node,
                )  # fmt: skip
                try:
                    done = await loop.run()
                except FINAL_ERRORS:
                    await loop.stop_peers()
                    raise
                # After any other error, the peers wait for the orchestrator of the next start.
                await loop.stop_peers()
                return done

    try:
        done = asyncio.run(serve())
    finally:
        sink.close()
        metrics.recorder.close()
    if only is None:
        _report(spec, config, path, metrics, done)


def _report(
    spec: Spec, config: RunConfig, path: Path, metrics: RunMetrics, done: m.TrainerDone
) -> None:
    """Write summary.json and the pages of a run that has ended, and print their names."""
    run = {"interrupted": done.interrupted, "steps": done.step, "model": config.model}
    with naming_full_disk(config.output_dir):
        summary = write_report(
            config.output_dir, path, versions=spec.versions, fit_compute=config.fit.compute,
            phases={**spec.phases, **metrics.phases},
            extra={**run, "aborted_requests": metrics.aborted},
        )  # fmt: skip
    shown = config.metrics.terminal != "off"
    if shown:
        print_table("megatron_rl run", report_lines(summary))
    # The trainer waits for this process, for `evaluation_seconds` in all.
    limit = min(PAGES_SECONDS, config.timeouts.evaluation_seconds / 4)
    for line in write_pages(config.output_dir, limit):
        if shown or line.startswith("no "):
            print(line, flush=True)


def main() -> None:
    """Run the process; an error is printed, written for the parent, and ends it with status 1 or 2.

    The status is `FINAL_STATUS` after an error of `FINAL_ERRORS`.
    """
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)
    try:
        run_orchestrator(spec)
    except Exception as e:  # noqa: BLE001 - the process ends here; the parent reports the cause
        traceback.print_exc()
        print(f"megatron_rl orchestrator: {e}", file=sys.stderr, flush=True)
        error = f"{type(e).__name__}: {e}"
        Path(f"{spec.endpoint_file}.error").write_text(error)
        report_failure(error)
        sys.exit(FINAL_STATUS if isinstance(e, FINAL_ERRORS) else 1)


if __name__ == "__main__":
    main()
