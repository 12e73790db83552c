"""A fake trainer and fake generators around the orchestrator: real sockets, random completions."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.data import Prompt, PromptSet
from megatron_rl.data.question import Question
from megatron_rl.orchestrator.event_loop import Orchestrator
from megatron_rl.orchestrator.run_metrics import RunMetrics
from megatron_rl.orchestrator.state import State, load_state
from megatron_rl.orchestrator_connection import OrchestratorConnection
from megatron_rl.rewards import Outcome, Verdict
from tests.proxy import Proxy


@dataclass
class Rows:
    """A sink that keeps the rows."""

    steps: list[dict] = field(default_factory=list)
    evals: list[dict] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)
    fleet: list[dict] = field(default_factory=list)
    """Events of generators and of prompts that failed."""
    notes: list[str] = field(default_factory=list)
    shown: list[list[dict]] = field(default_factory=list)
    """Samples of completions."""

    def write(self, kind, row):
        kinds = {"step": self.steps, "event": self.events}
        if row.get("event", "").startswith(("generator_", "prompt_")):
            kind, kinds = "fleet", {"fleet": self.fleet}
        kinds.get(kind, self.evals).append(row)

    def samples(self, rows):
        self.shown.append(rows)

    def note(self, text):
        self.notes.append(text)


ONE_TASK = {"task": {"train_prompts": 40, "heldout_prompts": 6}}
TWO_TASKS = {
    "task": {"train_prompts": 40, "heldout_prompts": 4},
    "tasks": {"arithmetic": {"weight": 2.0}, "sums": {"kind": "arithmetic"}},
}


def small_config(tasks=ONE_TASK, **schedule) -> RunConfig:
    return RunConfig(
        **tasks,
        schedule={
            "steps": 12,
            "prompts_per_step": 3,
            "completions_per_prompt": 4,
            "max_lag_steps": 2,
            **schedule,
        },
        generation={"thinking_budget_tokens": (8, 12), "answer_budget_tokens": 4},
        evaluation={"points": 3, "first_step": 3, "samples_per_prompt": 2},
        roles={"generator_ranks": 2},
        timeouts={"evaluation_seconds": 20, "startup_seconds": 20},
    )


def prompt_set(config: RunConfig, kind="exact") -> PromptSet:
    def some(size, base):
        named = [name for name, task in config.tasks.items() for _ in range(getattr(task, size))]
        return [
            Prompt(i, f"p{base + i}", [1, base + i, 3], Question("", kind, "", str(i)), name)
            for i, name in enumerate(named)
        ]

    heldout, sets = some("heldout_prompts", 900), {}
    for name in config.evaluation.sets:
        first = len(heldout) + sum(map(len, sets.values()))
        sets[name] = [
            Prompt(first + i, f"{name}{i}", [1, 7, 3], Question("", kind, "", str(i)), name)
            for i in range(3)
        ]
    fingerprints = {name: f"{len(one)} of {name}" for name, one in sets.items()}
    return PromptSet(some("train_prompts", 100), heldout, "fingerprint", sets, fingerprints)


def verify(prompt: Prompt, sample: m.Sample) -> Verdict:
    """Return `correct` if the first token is even."""
    right = m.ints(sample.token_ids)[0] % 2 == 0
    return Verdict(Outcome.CORRECT if right else Outcome.WRONG, "first token")


class AtOnce:
    """A verifier with immediate verdicts."""

    full, metrics = False, {}

    def __init__(self, verify):
        self.start = verify

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


class Late(AtOnce):
    """A verifier with late verdicts in any order; `limit` of them may be pending."""

    def __init__(self, verify, seconds=0.01, limit=10**6, seed=0):
        self.verify, self.seconds, self.limit = verify, seconds, limit
        self.rng, self.running, self.most = random.Random(seed), set(), 0

    async def __aexit__(self, *_):
        for task in self.running:
            task.cancel()

    @property
    def full(self):
        return len(self.running) >= self.limit

    def start(self, prompt, sample):
        seconds = self.rng.random() * self.seconds

        async def verdict():
            await asyncio.sleep(seconds)
            return self.verify(prompt, sample)

        task = asyncio.create_task(verdict())
        self.running.add(task)
        self.most = max(self.most, len(self.running))
        task.add_done_callback(self.running.discard)
        return task


class Peer:
    """A socket of this name, and the weight version that it reads now.

    `reading` comes from the trainer's stores, at once or through other stores; `loading` comes from
    the store of the node, which has a copy. `torn` are versions that were overwritten meanwhile.
    """

    reading = loading = main = None

    def __init__(self, endpoint, name):
        loop, self.inbox = asyncio.get_running_loop(), asyncio.Queue()

        def deliver(data):
            loop.call_soon_threadsafe(self.inbox.put_nowait, m.decode(data))

        def ended():
            loop.call_soon_threadsafe(self.inbox.put_nowait, None)

        self.name = name
        self.connection = OrchestratorConnection(endpoint, name, deliver, on_new_conversation=ended)

    async def send(self, message):
        self.connection.send(message)

    async def receive(self):
        return await self.inbox.get()


class Generator(Peer):
    """Returns each completion after a random time; a swap takes effect between two tokens."""

    def __init__(
        self, endpoint, index, seed, slowness=0.002, fail_after=None, late=0.0, node="generators"
    ):
        super().__init__(endpoint, f"generator-{index}")
        self.index, self.version, self.rng, self.node = index, -1, random.Random(seed), node
        self.slowness, self.fail_after, self.late = slowness, fail_after, late
        self.versions, self.folders, self.temperature, self.tasks = [], [], None, set()
        self.capacity, self.grows, self.groups, self.evaluated = 24, False, set(), set()

    async def run(self):
        await asyncio.sleep(self.late)
        await self.join()
        while True:
            message = await self.receive()
            if isinstance(message, m.Stop):
                break
            if message is None:  # the orchestrator has taken it for lost
                for task in self.tasks:
                    task.cancel()
                self.tasks.clear()
                await self.join()
            if isinstance(message, m.UpdateWeights):
                version = message.manifest.version
                self.reading, self.loading = (None, version) if message.folder else (version, None)
                self.folders.append(message.folder)
                await asyncio.sleep(self.slowness * self.rng.random())
                self.version, self.reading, self.loading = version, None, None
                self.versions.append(self.version)
                await self.send(
                    m.WeightsUpdated(
                        version=self.version, pause_seconds=0.01, transfer_seconds=0.005,
                        requests_in_flight=len(self.tasks),
                    )
                )  # fmt: skip
            elif isinstance(message, m.Generate):
                self.temperature = message.temperature
                self.groups |= {message.group} if message.evaluation < 0 else set()
                self.evaluated.add(message.evaluation)
                for i in message.indices:
                    task = asyncio.create_task(self.complete(message, i))
                    self.tasks.add(task)
                    task.add_done_callback(self.tasks.discard)
            elif isinstance(message, m.ScoreRequest):
                lps = [[-1.0] * len(c) for c in message.completions]
                await self.send(m.Scores(step=message.step, version=self.version, logprobs=lps))
        for task in list(self.tasks):
            task.cancel()

    async def join(self):
        await self.send(m.Join(process=f"process {self.index} on here", supervised=True))
        while not isinstance(answer := await self.receive(), m.Welcome):
            if answer is None:  # another conversation has begun meanwhile
                await self.send(m.Join(process=f"process {self.index} on here", supervised=True))
        rank, node = 2 + self.index, self.node
        await self.send(
            m.Hello(
                role="generator", rank=rank, version=0, node=node, capacity=self.capacity
            )
        )  # fmt: skip
        self.tasks.add(asyncio.create_task(self.tell_load()))

    async def tell_load(self):
        while True:
            await asyncio.sleep(0.3)
            stats = m.GeneratorStats(seconds=0.3, busy_seconds=0.1, tokens=10, aborted=0)
            await self.send(stats)

    async def complete(self, message: m.Generate, index: int):
        begun = message.begun.get(index, m.Partial(b"", b"", [], (0, 0)))
        spans, told = list(begun.spans), begun.num_tokens
        n = self.rng.randint(max(2, told + 1), max(6, told + 1))
        ids = self.ids(message, index, n)
        ids[:told] = m.ints(begun.token_ids).tolist()
        for token in range(told, n):
            await asyncio.sleep(self.slowness * self.rng.random())
            if spans and spans[-1].version == self.version:
                spans[-1] = m.VersionSpan(self.version, spans[-1].start, token + 1)
            else:
                spans.append(m.VersionSpan(self.version, token, token + 1))
            if self.grows and message.evaluation < 0 and token + 1 < n:
                one = m.int_bytes([ids[token]]), m.float_bytes([-1.0])
                rest = m.Partial(*one, list(spans), (0, 0))
                await self.send(m.Grown(group=message.group, index=index, start=token, rest=rest))
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after <= 0:
                await self.send(m.Failed(error="out of memory on rank 2"))
                self.main.cancel()
                for task in self.tasks:
                    task.cancel()
                return
        await self.send(
            m.Sample(
                group=message.group, index=index, prompt_id=message.prompt_id,
                evaluation=message.evaluation, token_ids=m.int_bytes(ids),
                logprobs=m.float_bytes([-1.0] * n), spans=spans,
                segments=[m.Segment("sampled", 0, n)], finish_reason="stop",
            )
        )  # fmt: skip

    def ids(self, message: m.Generate, index: int, n: int) -> list[int]:
        ids = [self.rng.randint(4, 30) for _ in range(n)]
        if message.evaluation < 0 and message.group % 2 == 0 and index < 2:
            # Right and wrong: in every batch there is something to learn.
            ids[0] = 2 * self.rng.randint(4, 14) + index
        return ids


class Store(Peer):
    """Takes a version once its source has it, later by up to `slowness` seconds.

    `stores` are all of a run by name. Its first sources, as many as `fails`, are of no use.
    """

    def __init__(self, endpoint, name, node, stores, slowness=0.0, fails=0):
        super().__init__(endpoint, name)
        self.node, self.stores, self.slowness, self.fails = node, stores, slowness, fails
        self.takes, self.has, self.sources, self.rng = name.startswith("store"), [], [], None
        self.generators, self.torn = [], []

    async def run(self):
        role, self.rng = "store" if self.takes else "trainer-store", random.Random(self.name)
        folder = f"/{self.name}"
        await self.send(m.Hello(role=role, rank=-1, version=-1, node=self.node, folder=folder))
        while not isinstance(message := await self.receive(), m.Stop):
            if self.reading is None and not self.has and not message.sources:
                await asyncio.sleep(self.slowness * self.rng.random())
                await self.send(m.StoreMemory(source=m.StoreSource(self.name, b"", ())))
            if self.takes:
                self.reading = version = message.manifest.version
                loading = {g.loading for g in self.generators}
                self.torn += [(version, v) for v in self.has[:-1] if v in loading]
                self.has = self.has[-1:]
            else:
                self.has = [message.manifest.version]
            if message.sources:
                await self.take(version, message.sources)

    async def take(self, version, sources):
        self.sources.append((version, [source.name for source in sources]))
        if len(self.sources) <= self.fails:
            failed = m.SourceFailed(version=version, source=sources[0].name, reason="torn")
            await self.send(failed)
            return
        for source in sources:
            while self.stores[source.name].takes and version not in self.stores[source.name].has:
                await asyncio.sleep(0.001)
        await asyncio.sleep(self.slowness * self.rng.random())
        self.has, self.reading = sorted([*self.has, version]), None
        num_bytes = {source.name: 10 for source in sources}
        await self.send(m.VersionTaken(version=version, seconds=0.1, num_bytes=num_bytes))


class Trainer(Peer):
    """Takes a batch, waits a little, publishes the next version.

    A version is announced up to `announce_after` seconds after the next batch was requested.
    """

    def __init__(
        self, endpoint, readers, nodes, start=0, stop_before=None, save_before=None,
        directory=None, announce_after=0.0,
    ):  # fmt: skip
        super().__init__(endpoint, m.TRAINER)
        self.readers, self.nodes, self.announce_after = readers, nodes, announce_after
        self.step, self.stop_before = start, stop_before
        self.save_before, self.directory = save_before, directory
        self.rng, self.announced, self.torn = random.Random(start), None, []

    async def run(self):
        hello = m.Hello(
            role="trainer", rank=0, version=0, active_parameters=100, max_logprob_error=0.1
        )
        await self.send(hello)
        await self.publish()
        while True:
            if self.step == self.save_before:
                await self.send(m.SaveState(step=self.step, directory=str(self.directory)))
                while not isinstance(await self.receive(), m.StateSaved):
                    pass
            if self.step == self.stop_before:
                await self.send(m.TrainerDone(step=self.step, interrupted=True))
                break
            await self.send(m.BatchRequest(step=self.step))
            while isinstance(batch := await self.receive(), m.BatchSkipped):
                pass
            if batch.stop:
                await self.send(m.TrainerDone(step=self.step, interrupted=False))
                break
            await asyncio.sleep(0.004)
            probe = [
                [-1.0] * (n - p)
                for n, p in zip(
                    m.ints(batch.bounds)[1:] - m.ints(batch.bounds)[:-1],
                    m.ints(batch.prompt_lengths),
                    strict=True,
                )
            ][: len(batch.probe)]
            await self.send(
                m.StepDone(
                    step=self.step, metrics={"loss": 0.1, "tokens_trained": 40.0},
                    probe_logprobs=probe, wait_seconds=0.001,
                    train_seconds=0.004, **self.results(batch),
                )
            )  # fmt: skip
            self.step += 1
            await self.publish()
        await self.announced

    def results(self, batch):
        """Return what `StepDone` has for tokens."""
        return {}

    async def publish(self):
        if self.announced is not None:
            await self.announced
        for peer in self.readers:  # this version replaces the one before the last
            if peer.reading is not None and peer.reading < self.step - 1:
                self.torn.append((self.step, peer.name, peer.reading))
        self.announced = asyncio.create_task(self.announce(self.step))

    async def announce(self, version):
        await asyncio.sleep(self.announce_after * self.rng.random())
        manifest = m.Manifest(version=version, buckets=(), root="/root", nodes=self.nodes)
        await self.send(m.Published(manifest=manifest, seconds=0.0))


@dataclass
class Fleet:
    """The generators of a run that is under way, for what befalls them."""

    endpoint: str
    generators: list[Generator]
    peers: list[Peer]
    tasks: list[asyncio.Task]
    orchestrator: Orchestrator

    async def at(self, step: int):
        """Wait until so many steps are trained."""
        while self.orchestrator.groups.trained_steps < step:
            await asyncio.sleep(0.003)

    def alive(self, index: int) -> Generator:
        """Return the newest generator of this index."""
        return [g for g in self.generators if g.index == index][-1]

    def start(self, index: int, slowness: float = 0.01, capacity: int = 24) -> Generator:
        """Start a generator of this index, as a new process would."""
        generator = Generator(self.endpoint, index, 7 * index + len(self.peers), slowness, node="t")
        generator.capacity = capacity
        self.generators.append(generator)
        self.peers.append(generator)
        generator.main = asyncio.create_task(generator.run())
        self.tasks.append(generator.main)
        return generator

    def stop(self, generator: Generator, *, close: bool) -> None:
        """Let it do nothing any more: its process was killed (`close`) or hangs."""
        generator.main.cancel()
        for task in list(generator.tasks):
            task.cancel()
        generator.reading = generator.loading = None
        if close:
            generator.connection.close()


@dataclass
class Finished:
    rows: Rows
    generators: list[Generator]
    trainer: Trainer
    orchestrator: Orchestrator
    stores: dict[str, Store]
    connections: int | None


def run(
    config,
    *,
    seed=0,
    directory=None,
    resume=False,
    slowness=0.002,
    fail_after=None,
    verification=None,
    kind="exact",
    concurrent=None,
    evaluated=None,
    written=(),
    clock=time.monotonic,
    late=0.0,
    evaluate_only=None,
    nodes=(),
    stores=None,
    cut_every=None,
    rows=None,
    faults=None,
    recorder=None,
    **trainer,
):
    """Run to the end and return the rows (`rows` if given) and the peers.

    `evaluated` are steps of the held-out prompts, or (set, step), that the run has had already.
    `concurrent(verification)` runs as a task. The second generator is `late` seconds late.
    A resumed run has the rows `written` in its file.
    All connections are cut every `cut_every` seconds.
    With `evaluate_only` there is no trainer, and the generators start with version 0.
    Rollout files are written by `recorder`.
    `faults(fleet)` runs as a task, with a `Fleet`.
    `nodes` are the trainer's, and `stores` the arguments of each generator's `Store`; the last
    generators have none and are on the trainer's node.
    """
    verification, rows = verification or AtOnce(verify), rows or Rows()

    async def go(stack):
        socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind("tcp://127.0.0.1:*")
        endpoint, proxy = socket.getsockopt_string(zmq.LAST_ENDPOINT), None
        if cut_every is not None:
            proxy = await stack.enter_async_context(Proxy(endpoint))
            endpoint = proxy.endpoint
        state: State | None = None
        if resume:
            state = load_state(directory, "fingerprint", config.schedule.prompts_per_step)
        sets = [one for one in evaluated or () if isinstance(one, tuple)]
        made = [{"kind": "sets", "step": step, "sets": {name: {}}} for name, step in sets]
        made += [{"kind": "eval", "step": s} for s in {*(evaluated or ())} - {*sets}]
        metrics = RunMetrics(rows, config.roles, [*written, *made], clock)
        metrics.recorder = recorder or metrics.recorder
        orchestrator = Orchestrator(
            config,
            prompt_set(config, kind),
            verification,
            metrics,
            socket,
            state,
            evaluate_only,
        )
        by_name = {}
        for node in nodes if stores else ():
            name = f"trainer-store-{node}"
            by_name[name] = Store(endpoint, name, node, by_name)
        for i, settings in enumerate(stores or ()):
            by_name[f"store-{i}"] = Store(endpoint, f"store-{i}", str(i), by_name, **settings)
        places = [str(i) if f"store-{i}" in by_name else "t" for i in range(config.roles.engines)]
        generators = [
            Generator(endpoint, i, 10 * seed + i, slowness, fail_after, late * i, node)
            for i, node in enumerate(places)
        ]
        for store in by_name.values():
            store.generators = [g for g in generators if g.node == store.node]
        readers, start = [*generators, *by_name.values()], state.step if state else 0
        peer = Trainer(endpoint, readers, nodes, start=start, directory=directory, **trainer)
        peers = [*generators, *by_name.values(), peer]
        if evaluate_only:
            peers = generators
            for generator in generators:
                generator.version = 0
        tasks = [asyncio.create_task(p.run()) for p in peers]
        for one, task in zip(peers, tasks, strict=True):
            one.main = task
        if faults is not None:
            tasks.append(
                asyncio.create_task(faults(Fleet(endpoint, generators, peers, tasks, orchestrator)))
            )
        if proxy is not None:
            tasks.append(asyncio.create_task(cut(proxy, cut_every)))
        try:
            async with verification:
                if concurrent is not None:
                    tasks.append(asyncio.create_task(concurrent(verification)))
                await asyncio.wait_for(orchestrator.run(), 60)
        finally:
            await orchestrator.stop_peers()
            await asyncio.wait(tasks, timeout=2)
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            for one in peers:
                one.connection.close()
            socket.close()
        assert [peer.torn, *(store.torn for store in by_name.values())] == [[]] * (len(by_name) + 1)
        return Finished(rows, generators, peer, orchestrator, by_name, proxy and proxy.connections)

    async def enter():
        async with AsyncExitStack() as stack:
            return await go(stack)

    return asyncio.run(enter())


async def cut(proxy, seconds):
    """Cut all connections now and then."""
    while True:
        await asyncio.sleep(seconds)
        proxy.cut()
