"""A discrete-event model of the asynchronous loop: how many steps an hour, and who waits.

The rules are those of a run, by its own classes: `Schedule` bounds the lag, `GroupQueue` counts
groups, `Generators` chooses engines and versions, `Stores` knows what may be overwritten. Here are
a clock, engines that decode, and a trainer, with the seconds of `LoopTimes`. Nothing fails;
evaluations, verifiers, refilled prompts, checkpoints and preempted requests are left out.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_rl.config import RunConfig
from megatron_rl.messages import Manifest
from megatron_rl.orchestrator.generators import Generators
from megatron_rl.orchestrator.groups import Group, GroupQueue
from megatron_rl.orchestrator.stores import Stores
from megatron_rl.rewards import Outcome, Verdict

Lengths = Callable[[int], Sequence[int]]  # group -> tokens of each of its completions
ENDLESS = 10**9  # steps: the end of a run, where engines idle, is not simulated
_DONE = Verdict(Outcome.CORRECT, "")


@dataclass(frozen=True, slots=True)
class LoopTimes:
    """Seconds of the parts of the loop.

    An iteration of an engine gives each running request a token and takes `iteration + request *
    (running requests) + context * (tokens that they attend to)`.
    """

    iteration: float
    request: float = 0.0
    context: float = 0.0
    prefill: float = 0.0  # of a prompt: so long its engine does not decode
    train: float = 0.0  # of a step, whatever its tokens
    train_token: float = 0.0  # of a completion token of the batch
    batch: float = 0.0  # from a step's last completion, or the request, to the start of training
    copy: float = 0.0  # after a step: the trainer waits
    publish: float = 0.0  # from the end of a step until its weights are announced
    travel: float = 0.0  # from there until an engine loads them, while it decodes
    pause: float = 0.0  # of an engine that loads them


@dataclass(frozen=True, slots=True)
class LoopRates:
    """Rates of the simulated steps; shares are of the time."""

    step_seconds: float
    tokens_per_hour: float
    trainer_wait: float  # share in which the trainer waits for a batch
    generator_wait: float  # share in which an engine has no request, mean over engines
    running: float  # requests that decode in an engine, mean over time and engines
    lag: dict[int, float]  # steps -> tokens

    @property
    def steps_per_hour(self) -> float:
        """Steps an hour."""
        return 3600 / self.step_seconds

    @property
    def lag_mean(self) -> float:
        """Mean lag of a token in steps."""
        return sum(lag * n for lag, n in self.lag.items()) / sum(self.lag.values())


def lognormal(seed: int, mean: float, sigma: float, most: int, size: int) -> Lengths:
    """Return lengths whose logarithms are normal, from 1 to `most`; `mean` is of those uncut."""
    mu = math.log(mean) - sigma**2 / 2

    def of(group: int) -> list[int]:
        rng = random.Random(f"lengths {seed} {group}")
        return [min(max(round(rng.lognormvariate(mu, sigma)), 1), most) for _ in range(size)]

    return of


class SimulatedEngine:
    """An engine's requests, which decode together, and the time that this takes.

    Between two changes k iterations take `linear * k + quadratic * k**2 / 2` seconds, since each
    adds a token per request to the context: no single iteration is simulated.
    """

    def __init__(self, capacity: int, times: LoopTimes, prompt_tokens: float) -> None:
        self._capacity, self._times, self._prompt = capacity, times, prompt_tokens
        self._now = self._free_at = self._count = self._context = 0.0
        self._running: list[tuple[float, float, int, int]] = []  # heap: end, start, group, index
        self._waiting: deque[tuple[int, int, int]] = deque()  # group, index, tokens
        self._swaps, self._versions = [0.0], [0]
        self.changes = 0  # of the time of the next end
        self.busy = self.request_seconds = 0.0  # time with requests, and their sum over requests

    def advance(self, now: float, *, ends: bool = False) -> None:
        """Decode until now; `ends` if now is when the next request ends."""
        if count := len(self._running):
            self.busy += now - self._now
            self.request_seconds += count * (now - self._now)
            done = self._left() if ends else self._iterations(now - max(self._now, self._free_at))
            self._count += done
            self._context += count * done
        self._now = now

    def _speed(self) -> tuple[float, float]:
        t, n = self._times, len(self._running)
        return t.iteration + t.request * n + t.context * self._context, t.context * n

    def _left(self) -> float:
        return max(self._running[0][0] - self._count, 0.0)

    def _iterations(self, seconds: float) -> float:
        linear, quadratic = self._speed()
        if seconds <= 0:
            return 0.0
        # The stable root of linear * k + quadratic * k**2 / 2 = seconds.
        root = linear + math.sqrt(linear**2 + 2 * quadratic * seconds)
        return min(2 * seconds / root, self._left()) if root else self._left()

    def next_end(self) -> float | None:
        """Return when the next request ends, if nothing changes; None without one."""
        if not self._running:
            return None
        (linear, quadratic), left = self._speed(), self._left()
        return max(self._now, self._free_at) + linear * left + quadratic * left**2 / 2

    def add(self, group: int, tokens: Sequence[int]) -> None:
        """Take the completions of a prompt."""
        self._waiting.extend((group, index, count) for index, count in enumerate(tokens))
        self.stop(self._times.prefill)

    def stop(self, seconds: float) -> None:
        """Decode nothing for so long."""
        self._free_at = max(self._now, self._free_at) + seconds
        self._fill()

    def swap(self, version: int) -> None:
        """Make the next tokens with this version."""
        self._swaps.append(self._count)
        self._versions.append(version)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._capacity:
            group, index, tokens = self._waiting.popleft()
            heapq.heappush(self._running, (self._count + tokens, self._count, group, index))
            self._context += self._prompt
        self.changes += 1

    def ended(self) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """Remove and return what is at its end: group, index, and tokens by version."""
        ended = []
        while self._running and self._running[0][0] <= self._count + 1e-6:
            end, start, group, index = heapq.heappop(self._running)
            self._context -= self._prompt + end - start
            ended.append((group, index, self._spans(start, end)))
        self._fill()
        return ended

    def _spans(self, start: float, end: float) -> list[tuple[int, int]]:
        spans, until = [], end
        for i in range(bisect_right(self._swaps, end) - 1, -1, -1):
            since = max(self._swaps[i], start)
            spans.append((self._versions[i], round(until) - round(since)))
            if since == start:
                break
            until = since
        return spans


class LoopSimulation:
    """One run in simulated time; `lengths` are equal whatever the order of events is."""

    def __init__(
        self, run: RunConfig, times: LoopTimes, lengths: Lengths, prompt_tokens: float = 0.0
    ) -> None:
        self._schedule = run.schedule.model_copy(update={"steps": ENDLESS})
        self._times, self._lengths, self._now = times, lengths, 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._groups = GroupQueue(run.schedule.prompts_per_step, lambda group: False)
        self._generators, self._stores = Generators(run), Stores(run)
        self._engines: dict[str, SimulatedEngine] = {}
        capacity = run.generation.concurrent_completions
        for number in range(run.roles.engines):
            name = f"generator-{number}"
            self._generators.join(name, "", False, 0.0)
            self._generators.hello(name, "", capacity)
            self._engines[name] = SimulatedEngine(capacity, times, prompt_tokens)
        self._spans: dict[int, list[tuple[int, int]]] = {}  # of each group: version, tokens
        self._lag: list[Counter[int]] = []  # of each step
        self._asked: float | None = None
        self._may_dispatch, self._oldest = True, 0  # False: no engine can take the next group
        self._groups_changed, self._announced_at, self._waited = True, 0.0, 0.0
        self._rows: list[tuple[float, ...]] = [(0.0,) * 5]  # sums at the end of each step

    def rates(self, steps: int) -> LoopRates:
        """Simulate, and return the rates of `steps` steps, to a phase's end.

        Before them, two phases or twice as many steps as the lag may be do not count.
        """
        if not self._engines:
            raise ValueError("a run without engines cannot be simulated: set roles.generator_ranks")
        s = self._schedule
        warm = 2 * max(s.max_lag_steps + 1, s.updates_per_phase)
        steps += -(warm + steps) % s.updates_per_phase
        self._announce(0)
        self._request()
        while len(self._rows) <= warm + steps:
            self._now, _, event = heapq.heappop(self._events)
            event()
            self._dispatch()
            self._answer_trainer()
        first, last = self._rows[warm], self._rows[warm + steps]
        seconds, waited, busy, running, tokens = (b - a for a, b in zip(first, last, strict=True))
        engines, lag = len(self._engines) * seconds, sum(self._lag[warm:], Counter())
        return LoopRates(
            step_seconds=seconds / steps,
            tokens_per_hour=3600 * tokens / seconds,
            trainer_wait=waited / seconds,
            generator_wait=1 - busy / engines,
            running=running / engines,
            lag=dict(sorted(lag.items())),
        )

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    # ------------------------------------------------------------ the orchestrator
    def _dispatch(self) -> None:
        """Send groups as `Orchestrator._dispatch` does."""
        while self._may_dispatch:
            step = self._groups.latest_step(self._groups.next_to_dispatch)
            self._oldest = self._schedule.oldest_version(step)
            if (g := self._generators.free(self._oldest)) is None:
                self._may_dispatch = False
                return
            make = partial(Group, size=self._schedule.completions_per_prompt)
            group, indices = self._groups.dispatch(lambda: 0, make)
            g.give((-1, group.index), indices)
            engine = self._engines[g.name]
            engine.advance(self._now)
            engine.add(group.index, self._lengths(group.index)[: group.size])
            self._watch(g.name)

    def _answer_trainer(self) -> None:
        """Give the next batch, under the conditions of `Orchestrator._answer_trainer`."""
        step, groups = self._groups.trained_steps, self._groups
        if self._asked is None or not self._groups_changed:
            return
        oldest = self._generators.oldest_read(set())
        if (step and self._stores.newest < step - 1) or (oldest is not None and oldest < step):
            return
        self._groups_changed = False
        ready = groups.next_groups()
        if ready is None or groups.next_groups(self._schedule.phase_steps(step)) is None:
            return
        groups.take(step, ready)
        self._stores.batch_given(step)
        lag: Counter[int] = Counter()
        for group in ready:
            for version, count in self._spans.pop(group.index):
                lag[step - version] += count
        self._lag.append(lag)
        start = self._now + self._times.batch
        self._waited += start - self._asked
        self._asked = None
        self._at(start + self._times.train + self._times.train_token * lag.total(), self._trained)

    # ------------------------------------------------------------ the trainer
    def _request(self) -> None:
        self._asked, self._groups_changed = self._now, True

    def _trained(self) -> None:
        self._may_dispatch = True
        self._groups.consume(self._groups.trained_steps)
        for engine in self._engines.values():
            engine.advance(self._now)
        busy = sum(engine.busy for engine in self._engines.values())
        running = sum(engine.request_seconds for engine in self._engines.values())
        tokens = self._rows[-1][-1] + self._lag[-1].total()
        self._rows.append((self._now, self._waited, busy, running, tokens))
        begin = max(self._now, self._announced_at)  # a version waits for the one before
        self._announced_at = begin + max(self._times.publish, self._times.copy)
        self._at(begin + self._times.copy, self._request)
        self._at(self._announced_at, partial(self._announce, self._groups.trained_steps))

    # ------------------------------------------------------------ versions and engines
    def _announce(self, version: int) -> None:
        manifest = Manifest(version=version, buckets=(), root="", nodes=())
        self._stores.publish(manifest)
        self._generators.publish(manifest, set())
        self._move_weights()

    def _move_weights(self) -> None:
        self._groups_changed = True
        updates = self._generators.updates(set(), self._stores.folder, self._now)
        for name, update in updates:
            load = partial(self._load, name, update.manifest.version)
            self._at(self._now + self._times.travel, load)

    def _load(self, name: str, version: int) -> None:
        engine = self._engines[name]
        engine.advance(self._now)
        engine.swap(version)
        engine.stop(self._times.pause)
        self._watch(name)
        self._at(self._now + self._times.pause, partial(self._updated, name, version))

    def _updated(self, name: str, version: int) -> None:
        self._may_dispatch = True
        self._generators.updated(name, version)
        self._move_weights()

    def _watch(self, name: str) -> None:
        engine = self._engines[name]
        if (when := engine.next_end()) is not None:
            self._at(when, partial(self._ended, name, engine.changes))

    def _ended(self, name: str, change: int) -> None:
        engine, g = self._engines[name], self._generators[name]
        if change != engine.changes:
            return  # it ends at another time
        engine.advance(self._now, ends=True)
        for index, completion, spans in engine.ended():
            g.took((-1, index), completion)
            group = self._groups[index]
            group.verdicts[completion] = _DONE
            self._spans.setdefault(index, []).extend(spans)
            if group.complete:
                self._groups.verified(group)
                self._groups_changed = True
        self._may_dispatch |= g.version >= self._oldest and g.in_flight < g.capacity
        self._watch(name)
