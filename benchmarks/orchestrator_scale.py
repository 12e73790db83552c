"""One orchestrator with a thousand engines: what a step of 2,048 long completions costs it.

    python benchmarks/orchestrator_scale.py [--engines 1000] [--steps 4] [--seconds 30] [--note ...]

The orchestrator is the real one in a process of its own (event loop, verification inline, metrics
to a folder); around some of its methods there are timers. This process is trainer rank 0: it takes
the batches with `trainer.client` over the real socket, and reports each step `--seconds` after it
got the batch. A third process has the engines: for each a DEALER socket and a `delivery.Link`, and
the messages of a generator (Join, Hello, WeightsUpdated, Grown every `fleet.report_tokens` tokens,
Sample, GeneratorStats every second, pings). No vLLM: tokens are random, half of the answers right.

First the engines idle for some seconds, then the steps follow. Seconds are CPU seconds of the
orchestrator's process, but for the delivery, which is wall time from the batch's last array until
the trainer has decoded it. What depends on time (stats, pings) and what depends on completions are
told apart by the idle part; so the cost of a step of 100 s follows from shorter ones.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tokenizers import Tokenizer  # noqa: E402

from megatron_rl import messages as m  # noqa: E402
from megatron_rl.config import RunConfig  # noqa: E402
from megatron_rl.data import load_prompts, read_format  # noqa: E402
from megatron_rl.data.prompt_format import save_tiny_tokenizer  # noqa: E402
from megatron_rl.delivery import TICK_SECONDS, Link, Links  # noqa: E402
from megatron_rl.orchestrator import child_process, main  # noqa: E402
from megatron_rl.orchestrator.connection import Connection  # noqa: E402
from megatron_rl.orchestrator.event_loop import Orchestrator  # noqa: E402
from megatron_rl.orchestrator.membership import Membership  # noqa: E402
from megatron_rl.orchestrator.steps import StepBuilder  # noqa: E402
from megatron_rl.orchestrator.verification import Verification  # noqa: E402
from megatron_rl.trainer.client import TrainerClient  # noqa: E402

RESULT = ROOT / "benchmarks/results/orchestrator_scale.md"
STEP_SECONDS = 100.0
"""The step whose share is asked for."""
STATS_SECONDS = 1.0
START_SECONDS = 300.0
LONGEST_LEAP = 0.05
"""Seconds of decoding between two looks at the sockets."""
MOST_KEPT = 8
"""Messages of an engine that the orchestrator has not acknowledged, on average."""


# ---------------------------------------------------------------- orchestrator
class Timers:
    """CPU seconds and calls of the orchestrator's methods, by name; nested ones count twice.

    The clock itself takes some microseconds for each call, which are in the figures.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.built_at = 0.0

    def add(self, owner: type, method: str, name: str) -> None:
        """Count the calls of a method."""
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - begin
                self.calls[name] += 1

        setattr(owner, method, timed)

    def install(self) -> None:
        """Put the timers into the orchestrator's classes."""
        decode, build, send = Verification.__init__, StepBuilder.build, Connection.send

        def with_timed_decode(this: Any, settings: Any, kinds: Any, inner: Any) -> None:
            def timed(ids: list[int]) -> str:
                begin = time.thread_time()
                self.calls["decode text"] += 1
                text: str = inner(ids)
                self.seconds["decode text"] += time.thread_time() - begin
                return text

            decode(this, settings, kinds, timed)

        def timed_build(this: Any, *args: Any) -> Any:
            begin = time.thread_time()
            built = build(this, *args)
            name = "assemble" if built is not None else "wait for groups"
            self.seconds[name] += time.thread_time() - begin
            self.calls[name] += 1
            if built is not None:
                self.built_at = time.monotonic()
            return built

        def timed_send(this: Any, to: str, message: m.Message) -> None:
            begin = time.thread_time()
            send(this, to, message)
            name = "encode batch" if isinstance(message, m.Batch) else "encode others"
            self.seconds[name] += time.thread_time() - begin
            self.calls[name] += 1

        Verification.__init__ = with_timed_decode  # type: ignore[method-assign, assignment]
        StepBuilder.build = timed_build  # type: ignore[method-assign]
        Connection.send = timed_send  # type: ignore[method-assign]
        self.add(Connection, "_read", "read")
        self.add(Connection, "_take", "receive")
        self.add(Verification, "start", "verify")
        self.add(Membership, "check", "membership")
        self.add(Links, "tick", "ticks")
        self.add(Orchestrator, "_handle", "handle")
        for part in ("_dispatch", "_evaluate", "_move_weights", "_advance_clock"):
            self.add(Orchestrator, part, part.strip("_"))

    def row(self) -> dict[str, Any]:
        """Return what was counted up to now."""
        return {
            "at": time.monotonic(),
            "cpu": time.process_time(),
            "seconds": dict(self.seconds),
            "calls": dict(self.calls),
            "built_at": self.built_at,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def orchestrate(spec: str, rows: str) -> None:
    """Run the orchestrator of a `Spec`; write into a file, again and again, what timers say."""
    timers = Timers()
    timers.install()

    def write() -> None:
        with open(rows, "ab", buffering=0) as file:
            while True:
                file.write(msgspec.json.encode(timers.row()) + b"\n")
                time.sleep(0.1)

    threading.Thread(target=write, daemon=True).start()
    sys.argv = ["orchestrator", spec]
    main.main()


# ---------------------------------------------------------------- engines
class Calendar:
    """What happens next, by its time."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do something at a time."""
        heapq.heappush(self._entries, (when, next(self._numbers), act))

    def advance(self, now: float) -> None:
        """Do what is due."""
        while self._entries and self._entries[0][0] <= now:
            heapq.heappop(self._entries)[2]()


class Fleet:
    """All engines in one thread.

    Ticks and stats follow the clock. Completions follow one of their own, which stands still while
    this process, or the orchestrator, is behind: on a busy machine steps take longer.
    """

    def __init__(self, config: RunConfig, model: Path, endpoint: str, args: Any) -> None:
        self.args, self.rng = args, random.Random(1)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        form = read_format(model, config.generation.think_start)
        prompts = load_prompts(config, tokenizer, form)
        self.golds = {p.id: p.question.gold for p in prompts.train}
        self.encode = lambda text: m.int_bytes(tokenizer.encode(text, add_special_tokens=False).ids)
        digits = m.ints(self.encode("0123456789"))
        rng = np.random.default_rng(0)
        self.thoughts = [
            (m.int_bytes(rng.choice(digits, args.tokens)), m.float_bytes(-rng.random(args.tokens)))
            for _ in range(16)
        ]
        self.every, self.capacity = config.fleet.report_tokens, args.capacity
        self.steady = args.seconds * (1 + config.schedule.max_lag_steps)
        self.in_steady = args.prompts * (1 + config.schedule.max_lag_steps)
        self.clock, self.decoding, self.decoded_to, self.kept = Calendar(), Calendar(), 0.0, 0
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, args.engines + 16)
        self.engines = [SimulatedEngine(self, i, endpoint) for i in range(args.engines)]
        self.left = len(self.engines)
        self.ready = 0

    async def run(self) -> None:
        """Serve until every engine has got Stop."""
        loop, last = asyncio.get_running_loop(), time.monotonic()
        for i, engine in enumerate(self.engines):
            loop.add_reader(engine.socket.FD, engine.read)
            engine.send(m.Join(process=f"process {i} on a host", supervised=True))
            self.clock.at(last + TICK_SECONDS * i / len(self.engines), engine.tick)
        while self.left:
            now = time.monotonic()
            self.clock.advance(now)
            if self.kept < MOST_KEPT * len(self.engines):
                self.decoded_to += min(now - last, LONGEST_LEAP)
                self.decoding.advance(self.decoded_to)
            last = now
            await asyncio.sleep(0.005)
        self.context.destroy(linger=500)


class SimulatedEngine:
    """The messages of one generator; each completion grows evenly over the time that it takes."""

    def __init__(self, fleet: Fleet, index: int, endpoint: str) -> None:
        self.fleet, self.index, self.link = fleet, index, Link()
        self.version, self.is_reading, self.is_stopped, self.kept = -1, False, False, 0
        self.socket = fleet.context.socket(zmq.DEALER)
        self.socket.identity = f"generator-{index}".encode()
        self.socket.set_hwm(0)
        self.socket.connect(endpoint)

    def send(self, message: m.Message) -> None:
        """Send a message, and read: a socket that was written to does not wake its reader."""
        self.socket.send_multipart(self.link.send(m.encode(message)))
        self.read()

    def read(self) -> None:
        """Read what has come."""
        if self.is_reading or self.is_stopped:
            return
        self.is_reading = True
        while True:
            try:
                header, payload = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            is_message, back = self.link.receive(header, payload)
            for frame in back:
                self.socket.send_multipart(frame)
            if self.link.is_ended:
                raise ConnectionError(f"engine {self.index} was taken for lost")
            if is_message:
                self.handle(m.decode(payload))
        self.is_reading = False

    def tick(self) -> None:
        """Send what is due."""
        if not self.is_stopped:
            for frame in self.link.tick():
                self.socket.send_multipart(frame)
            self.read()
            before, self.kept = self.kept, len(self.link._kept)
            self.fleet.kept += self.kept - before
            self.fleet.clock.at(time.monotonic() + TICK_SECONDS, self.tick)

    def stats(self) -> None:
        """Tell the load, every second."""
        if not self.is_stopped:
            self.send(m.GeneratorStats(seconds=1.0, busy_seconds=1.0, tokens=1000, aborted=0))
            self.fleet.clock.at(time.monotonic() + STATS_SECONDS, self.stats)

    def handle(self, message: m.Message) -> None:
        """Answer the orchestrator."""
        fleet = self.fleet
        if isinstance(message, m.Welcome):
            capacity = fleet.capacity
            self.send(m.Hello(role="generator", rank=1, version=0, node="n", capacity=capacity))
            first = time.monotonic() + STATS_SECONDS * fleet.rng.random()
            fleet.clock.at(first, self.stats)
            fleet.ready += 1
            if fleet.ready == len(fleet.engines):
                print("ready", flush=True)
        elif isinstance(message, m.UpdateWeights):
            self.version = message.manifest.version
            self.send(
                m.WeightsUpdated(
                    version=self.version, pause_seconds=0.1, transfer_seconds=0.1,
                    requests_in_flight=1,
                )
            )  # fmt: skip
        elif isinstance(message, m.Generate):
            for index in message.indices:
                self.begin(message, index)
        elif isinstance(message, m.ScoreRequest):
            rows = [[-0.5] * len(c) for c in message.completions]
            self.send(m.Scores(step=message.step, version=self.version, logprobs=rows))
        elif isinstance(message, m.Stop):
            self.is_stopped = True
            fleet.left -= 1

    def begin(self, request: m.Generate, index: int) -> None:
        """Begin a completion; the first ones are at different places, as in a run under way."""
        fleet, tokens = self.fleet, self.fleet.args.tokens
        takes = fleet.steady if request.evaluation < 0 else fleet.args.seconds
        if request.evaluation < 0 and request.group < fleet.in_steady:
            takes *= (request.group + 1) / fleet.in_steady
        takes *= 0.9 + 0.1 * fleet.rng.random()
        begin, spans = fleet.decoded_to, [m.VersionSpan(self.version, 0, 0)]
        thought = fleet.rng.choice(fleet.thoughts)

        def extend(end: int) -> list[m.VersionSpan]:
            last = spans[-1]
            if last.version == self.version or request.evaluation >= 0:
                spans[-1] = m.VersionSpan(last.version, last.start, end)
            else:
                spans.append(m.VersionSpan(self.version, last.end, end))
            return spans

        def grow(start: int) -> None:
            end = start + fleet.every
            part = slice(4 * start, 4 * end)
            rest = m.Partial(thought[0][part], thought[1][part], extend(end), (0, 0))
            self.send(m.Grown(group=request.group, index=index, start=start, rest=rest))
            plan(end)

        def finish() -> None:
            answer = fleet.golds[request.prompt_id] if index % 2 == 0 else "99"
            tail = fleet.encode(f"</think>\\boxed{{{answer}}}<eos>")
            self.send(
                m.Sample(
                    group=request.group, index=index, prompt_id=request.prompt_id,
                    evaluation=request.evaluation, token_ids=thought[0][: -len(tail)] + tail,
                    logprobs=thought[1], segments=[m.Segment("sampled", 0, tokens)],
                    spans=extend(tokens), finish_reason="stop",
                )
            )  # fmt: skip

        def plan(start: int) -> None:
            end = min(start + fleet.every, tokens)
            grows = end < tokens and request.evaluation < 0
            when = begin + takes * ((end if grows else tokens) / tokens)
            fleet.decoding.at(when, (lambda: grow(start)) if grows else finish)

        plan(0)


def run_engines(folder: Path, endpoint: str, args: Any) -> None:
    """Run all engines until they are stopped."""
    config = RunConfig.model_validate(json.loads((folder / "config.json").read_text()))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(Fleet(config, folder / "model", endpoint, args).run())


# ---------------------------------------------------------------- trainer, and the measurement
def configuration(folder: Path, args: Any) -> RunConfig:
    """Return the run's configuration."""
    answer = min(64, args.tokens // 2)
    return RunConfig(
        output_dir=folder / "run",
        task={"train_prompts": max(4 * args.prompts, 512), "heldout_prompts": 4},
        schedule={
            "steps": max(1000, args.steps),
            "prompts_per_step": args.prompts,
            "completions_per_prompt": args.completions,
        },
        generation={
            "thinking_budget_tokens": (args.tokens - answer, args.tokens - answer),
            "answer_budget_tokens": answer,
        },
        fleet={"report_tokens": args.report_tokens},
        roles={"generator_ranks": args.engines},
        evaluation={"every_steps": 20, "samples_per_prompt": 1},
        metrics={"terminal": "off"},
    )


@contextmanager
def child(*command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a part of this script as a process; it is gone in the end."""
    script = [sys.executable, str(Path(__file__).resolve()), *command]
    process = subprocess.Popen(script, text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(file: Path, process: subprocess.Popen[str]) -> str:
    """Return the contents of a file that a process writes."""
    deadline = time.monotonic() + START_SECONDS
    while not file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise ChildProcessError(f"no {file.name}: status {process.poll()}")
        time.sleep(0.05)
    return file.read_text()


def measure(folder: Path, args: Any) -> dict[str, Any]:
    """Run everything and return what it cost."""
    config = configuration(folder, args)
    (folder / "model").mkdir()
    (folder / "run").mkdir()
    save_tiny_tokenizer(folder / "model")
    tree = config.model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps(tree))
    spec = child_process.Spec(
        config=tree, model_dir=str(folder / "model"), trainer_node="", bind="tcp://127.0.0.1:*",
        endpoint_file=str(folder / "endpoint"), phases={}, versions={},
    )  # fmt: skip
    (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
    paths = [str(folder / "spec.json"), str(folder / "rows.jsonl")]
    names = "engines", "prompts", "completions", "tokens", "capacity", "seconds"
    own = [f"--{name}={getattr(args, name)}" for name in names]
    load = os.getloadavg()
    with child("--role=orchestrator", *paths) as orchestrator:
        endpoint = wait_for(folder / "endpoint", orchestrator)
        engines = ["--role=engines", *own, str(folder), endpoint]
        with child(*engines, stdout=subprocess.PIPE) as fleet:
            assert fleet.stdout is not None
            if not fleet.stdout.readline():
                raise ChildProcessError("the engines ended")
            time.sleep(min(3.0, args.idle))
            idle = [time.monotonic()]
            time.sleep(args.idle)
            idle.append(time.monotonic())
            steps = train(endpoint, config, (orchestrator, fleet), args)
            if (status := orchestrator.wait(60)) != 0:
                raise ChildProcessError(f"the orchestrator ended with status {status}")
            if (status := fleet.wait(60)) != 0:
                raise ChildProcessError(f"the engines ended with status {status}")
    rows = [msgspec.json.decode(line) for line in (folder / "rows.jsonl").open()]
    return {"load": (load, os.getloadavg()), **evaluated(rows, idle, steps, args)}


def train(
    endpoint: str, config: RunConfig, others: tuple[subprocess.Popen[str], ...], args: Any
) -> list[dict[str, float]]:
    """Take the batches as trainer rank 0 and return the times of each step."""

    def alive() -> str | None:
        ended = [status for other in others if (status := other.poll()) is not None]
        return f"a process of the benchmark ended with status {ended[0]}" if ended else None

    client = TrainerClient(
        endpoint, config.timeouts, active_parameters=10**9, max_logprob_error=1e9,
        alive=alive,
    )  # fmt: skip
    manifest = m.Manifest(version=0, buckets=(), root=str(args.idle), nodes=())
    client.announce(manifest, 0.0)
    times = []
    for step in range(args.steps):
        batch = client.next_batch(step)
        got = time.monotonic()
        lengths = np.diff(m.ints(batch.bounds)) - m.ints(batch.prompt_lengths)
        assert lengths.tolist() == [args.tokens] * (args.prompts * args.completions), lengths
        assert abs(m.floats(batch.loss_weights).sum(dtype=float) - 1) < 1e-3
        num_bytes = sum(len(v) for v in msgspec.structs.astuple(batch) if isinstance(v, bytes))
        if times:
            time.sleep(max(0.0, times[-1]["got"] + args.seconds - time.monotonic()))
        client.step_done(
            m.StepDone(
                step=step, metrics={"loss": 0.0, "tokens_trained": float(lengths.sum())},
                probe_logprobs=[[-0.5] * int(lengths[i]) for i in batch.probe],
                wait_seconds=0.0, train_seconds=args.seconds,
            ), 0.0,
        )  # fmt: skip
        client.announce(msgspec.structs.replace(manifest, version=step + 1), 0.1)
        times.append({"got": got, "done": time.monotonic(), "mib": num_bytes / 2**20})
        del batch
    client.send(m.TrainerDone(step=args.steps, interrupted=True))
    client.close()
    return times


def evaluated(
    rows: list[dict[str, Any]], idle: list[float], steps: list[dict[str, float]], args: Any
) -> dict[str, Any]:
    """Return the cost of a second of idling, and of a step."""

    def between(begin: float, end: float) -> dict[str, Any]:
        first = next(r for r in rows if r["at"] >= begin)
        last = [r for r in rows if r["at"] <= end][-1]
        parts = last["seconds"].keys()
        return {
            "wall": last["at"] - first["at"],
            "cpu": last["cpu"] - first["cpu"],
            "seconds": {k: last["seconds"][k] - first["seconds"].get(k, 0.0) for k in parts},
            "calls": {k: n - first["calls"].get(k, 0) for k, n in last["calls"].items()},
        }

    # From batch to batch: each interval has the completions of one step.
    resting, working = between(*idle), between(steps[0]["got"], steps[-1]["got"])
    count = len(steps) - 1
    per_second = resting["cpu"] / resting["wall"]
    per_step = (working["cpu"] - per_second * working["wall"]) / count
    seconds = {k: v / count for k, v in working["seconds"].items()}
    delivery = [
        s["got"] - max(r["built_at"] for r in rows if 0 < r["built_at"] <= s["got"]) for s in steps
    ]
    assembled = rows[-1]["seconds"]["assemble"] / rows[-1]["calls"]["assemble"]
    encoded = rows[-1]["seconds"]["encode batch"] / rows[-1]["calls"]["encode batch"]
    return {
        "idle cpu share": per_second,
        "idle frames per second": resting["calls"]["receive"] / resting["wall"],
        "step wall": working["wall"] / count,
        "cpu share": working["cpu"] / working["wall"],
        "frames per second": working["calls"]["receive"] / working["wall"],
        "messages per second": working["calls"]["handle"] / working["wall"],
        "cpu per step": per_step,
        "share of 100 s": (per_step + per_second * STEP_SECONDS) / STEP_SECONDS,
        "assembly": assembled,
        "encoding": encoded,
        "delivery": sorted(delivery)[len(delivery) // 2],
        "assembly and delivery share": (assembled + max(delivery)) / STEP_SECONDS,
        "batch mib": steps[-1]["mib"],
        "peak mib": rows[-1]["peak_mib"],
        "parts": seconds,
        "calls": {k: n / count for k, n in working["calls"].items()},
    }


def page(found: dict[str, Any], args: Any) -> str:
    """Return the result as a page."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    model = next(names, platform.machine())
    date = time.strftime("%Y-%m-%d")
    command = " ".join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]])
    load = ", ".join(f"{before[0]:.1f}" for before in found["load"])
    total = args.prompts * args.completions
    parts = [
        ("sockets read, frames taken included", "read"),
        ("of these: frames taken, messages decoded", "receive"),
        ("messages handled (verification included)", "handle"),
        ("of these: verification", "verify"),
        ("of these: token ids to text (the tokenizer)", "decode text"),
        ("batch assembled", "assemble"),
        ("batch encoded", "encode batch"),
        ("other messages encoded", "encode others"),
        ("looking whether the groups are complete", "wait for groups"),
        ("dispatch", "dispatch"),
        ("evaluations", "evaluate"),
        ("weight updates", "move_weights"),
        ("who is lost", "membership"),
        ("what is due to the peers", "ticks"),
        ("clock", "advance_clock"),
    ]
    return "\n".join(
        [
            f"# One orchestrator with {args.engines:,} engines",
            "",
            f"`{command}`. Processor: {model}, {os.cpu_count()} cores; date: {date};"
            f" load before and after: {load}; machine: {args.note or 'not said'}.",
            "",
            f"{args.engines:,} simulated engines, {total:,} completions of {args.tokens:,} tokens"
            f" a step ({args.prompts} prompts), progress told every {args.report_tokens} tokens,"
            f" PipelineRL-8; {args.steps} steps of {found['step wall']:.0f} s. CPU seconds are"
            " those of the orchestrator's process; the delivery is wall time, from the batch's last"
            " array until the trainer has decoded it.",
            "",
            "| | |",
            "|---|--:|",
            f"| CPU share while the engines idle | {found['idle cpu share']:.1%} |",
            f"| frames a second while they idle | {found['idle frames per second']:,.0f} |",
            f"| CPU share in these steps | {found['cpu share']:.1%} |",
            f"| messages a second in these steps | {found['messages per second']:,.0f} |",
            f"| frames a second in these steps | {found['frames per second']:,.0f} |",
            f"| CPU seconds for a step's completions | {found['cpu per step']:.1f} |",
            f"| CPU share in steps of 100 s | {found['share of 100 s']:.1%} |",
            f"| batch assembly, CPU seconds | {found['assembly']:.2f} |",
            f"| batch delivery ({found['batch mib']:.0f} MiB), seconds | {found['delivery']:.2f} |",
            f"| assembly and slowest delivery, share of 100 s |"
            f" {found['assembly and delivery share']:.2%} |",
            f"| peak memory of the orchestrator | {found['peak mib']:,.0f} MiB |",
            "",
            "A step's CPU seconds by part, in the thread of the event loop:",
            "",
            "| part | seconds | calls |",
            "|---|--:|--:|",
            *(
                f"| {title} | {found['parts'][key]:.2f} | {found['calls'].get(key, 0):,.0f} |"
                for title, key in parts
                if key in found["parts"]
            ),
            "",
        ]
    )


def main_of_script() -> None:
    """Run the benchmark, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--report-tokens", type=int, default=256)
    parser.add_argument("--capacity", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a step")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds without work")
    parser.add_argument("--note", default="", help="how busy the machine is")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("--role", choices=("orchestrator", "engines"), help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "orchestrator":
        orchestrate(*args.paths)
    elif args.role == "engines":
        run_engines(Path(args.paths[0]), args.paths[1], args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = measure(Path(folder), args)
            except Exception:
                lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
                lost = [line for line in lines if "generator_lost" in line]
                print(*lost[:5], sep="\n", file=sys.stderr)
                raise
        print(json.dumps(found))
        text = page(found, args)
        print(text)
        if args.write:
            RESULT.write_text(text)


if __name__ == "__main__":
    main_of_script()
