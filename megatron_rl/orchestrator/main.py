"""The orchestrator as a process: `python -m megatron_rl.orchestrator.main SPEC.json`."""

import asyncio
import resource
import signal
import sys
import traceback
from functools import partial
from pathlib import Path

import msgspec
import zmq.asyncio
from tokenizers import Tokenizer

from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.data import PromptSet, load_prompts, read_format
from megatron_rl.files import replace_file, report_failure
from megatron_rl.metrics.metrics_file import MetricsWriter, read_metrics
from megatron_rl.metrics.run_report import print_report, write_report
from megatron_rl.metrics.sink import RunSink
from megatron_rl.orchestrator.child_process import Spec
from megatron_rl.orchestrator.event_loop import Orchestrator
from megatron_rl.orchestrator.run_metrics import RunMetrics
from megatron_rl.orchestrator.state import load_state
from megatron_rl.orchestrator.verification import Verification


def _raise_limit_of_files() -> None:
    # Shells give 1024 files. 600 generators and the verifier's workers need more, and a connection
    # beyond the limit would wait without an error.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))


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
    only = spec.evaluate_only
    if only is not None:
        prompts = PromptSet([], only.heldout, "")
    else:
        prompts = load_prompts(config, tokenizer, read_format(model, config.generation.think_start))
    state, step = None, None
    if spec.checkpoint:
        checkpoint = Path(spec.checkpoint)
        per_step, sets = config.schedule.prompts_per_step, prompts.set_fingerprints
        state = load_state(checkpoint, prompts.fingerprint, per_step, sets)
        step = state.step
    path = config.output_dir / "metrics.jsonl"
    sink = RunSink(config, MetricsWriter(path, resume_step=step), step or 0)
    metrics = RunMetrics(sink, config.roles, read_metrics(path))
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    verification = Verification(config.verifier, prompts.verifiers, decode)

    async def serve() -> m.TrainerDone:
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 2000
            socket.set_hwm(0)
            socket.bind(spec.bind)
            replace_file(Path(spec.endpoint_file), socket.getsockopt_string(zmq.LAST_ENDPOINT))
            async with verification:
                loop = Orchestrator(config, prompts, verification, metrics, socket, state, only)
                try:
                    return await loop.run()
                finally:
                    await loop.stop_peers()

    try:
        done = asyncio.run(serve())
    finally:
        sink.close()
    if only is not None:
        return
    run = {"interrupted": done.interrupted, "steps": done.step, "model": config.model}
    extra = {**run, "aborted_requests": metrics.aborted}
    phases, fit = {**spec.phases, **metrics.phases()}, config.fit.compute
    summary = write_report(
        config.output_dir, path, phases=phases, fit_compute=fit, versions=spec.versions, extra=extra
    )
    if config.metrics.terminal != "off":
        print_report(summary)


def main() -> None:
    """Run the process; an error is printed, written for the parent, and ends it with status 1."""
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)
    try:
        run_orchestrator(spec)
    except Exception as e:  # noqa: BLE001 - the process ends here; the parent reports the cause
        traceback.print_exc()
        print(f"megatron_rl orchestrator: {e}", file=sys.stderr, flush=True)
        error = f"{type(e).__name__}: {e}"
        Path(f"{spec.endpoint_file}.error").write_text(error)
        report_failure(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
