"""Who belongs to the run: peers that join, leave or are lost, and the work that comes back."""

import os
import signal
import sys
import time

from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.orchestrator import RunError, TrainerGone
from megatron_rl.orchestrator.connection import Connection
from megatron_rl.orchestrator.evaluation import Evaluations
from megatron_rl.orchestrator.generators import Generators, GeneratorState
from megatron_rl.orchestrator.groups import GroupQueue
from megatron_rl.orchestrator.run_metrics import RunMetrics
from megatron_rl.orchestrator.stores import Stores


class Membership:
    """The members of a run; all lost work goes back to `groups` and `evaluations`.

    `welcome` answers generators that join; without a trainer (`evaluate_only`), a generator serves
    with the version that it says hello with.
    """

    def __init__(
        self,
        config: RunConfig,
        welcome: m.Welcome,
        connection: Connection,
        generators: Generators,
        stores: Stores,
        groups: GroupQueue,
        evaluations: Evaluations,
        metrics: RunMetrics,
        *,
        evaluate_only: bool,
    ) -> None:
        self._config, self._welcome, self._connection = config, welcome, connection
        self._generators, self._stores, self._groups = generators, stores, groups
        self._evaluations, self._metrics = evaluations, metrics
        self._evaluate_only = evaluate_only
        self._trainer_ranks: dict[str, float] = {}  # name -> when its silence was reported, or 0
        self._lost_at: dict[str, float] = {}
        self._last_failure = ""
        self._alone_since, self._parent = time.monotonic(), os.getppid()

    def join(self, sender: str, join: m.Join) -> None:
        """Welcome a generator; one of this name that was a member is lost."""
        self._check_protocol(sender, join.protocol)
        if sender in self._generators:
            self._lose(self._generators[sender], "its process was restarted", ended=False)
        self._generators.join(sender, join.process, join.supervised, time.monotonic())
        self._connection.send(sender, self._welcome)

    def hello(self, sender: str, hello: m.Hello) -> None:
        """Take a peer that is ready."""
        self._check_protocol(sender, hello.protocol)
        if hello.role == m.TRAINER:
            self._metrics.active_parameters = hello.active_parameters
            self._metrics.max_logprob_error = hello.max_logprob_error
        if hello.role in (m.TRAINER, "trainer-rank"):
            self._trainer_ranks[sender] = 0.0
        elif hello.role in ("store", "trainer-store"):
            self._stores.add(sender, hello)
        elif sender in self._generators:
            generator = self._generators.hello(sender, hello.node, hello.capacity)
            if self._evaluate_only:
                generator.version, generator.standing = hello.version, "healthy"
                self._ready(generator)

    def _check_protocol(self, sender: str, protocol: int) -> None:
        if protocol != m.PROTOCOL:
            raise RunError(
                f"{sender} speaks protocol {protocol}, this is {m.PROTOCOL}: install the same"
                " version of megatron_rl on every rank"
            )

    def updated(self, sender: str, updated: m.WeightsUpdated) -> None:
        """Note that a generator loaded a version; with its first one it gets work."""
        if self._generators.updated(sender, updated.version):
            self._ready(self._generators[sender])

    def _ready(self, generator: GeneratorState) -> None:
        now = time.monotonic()
        since = self._lost_at.pop(generator.name, generator.joined_at)
        self._metrics.generator_ready(generator.name, generator.process, now - since)

    def leaving(self, sender: str) -> None:
        """Give a generator no more work, and let it go when it has none."""
        self._generators.leave(sender)
        self.let_go(self._generators[sender])

    def rollout_failed(self, sender: str, failed: m.RolloutFailed) -> None:
        """Have a rollout made again, or drop it; either way it is counted and gets no reward."""
        generator, attempts = self._generators[sender], self._config.rollout.attempts
        if not generator.took((failed.evaluation, failed.group), failed.index):
            return
        self.let_go(generator)
        if failed.evaluation >= 0:
            dropped = self._evaluations.rollout_failed(failed, attempts)
        elif (group := self._groups.get(failed.group)) is None:
            return  # it was dropped
        else:
            dropped = self._groups.rollout_failed(group, failed.index, attempts)
        self._metrics.rollout_failed(failed, dropped)

    def let_go(self, generator: GeneratorState) -> None:
        """End a generator that is leaving and has returned its last completion."""
        if generator.standing == "leaving" and not generator.in_flight:
            self._connection.send(generator.name, m.Stop())
            self._generators.remove(generator.name)
            self._metrics.generator_lost(generator, "it was asked to leave", 0, [], lost=False)

    def left(self, sender: str) -> None:
        """Take over the work of a generator that ends."""
        self._lose(self._generators[sender], "it gave back its work", ended=True, counts=False)

    def failed(self, sender: str, failure: m.Failed) -> None:
        """Take over the work of a peer that ends with an error.

        Raises:
            RunError: the run cannot go on without it, or it never could.
        """
        if sender in self._generators:
            generator = self._generators[sender]
            if generator.supervised and generator.capacity == 0 and not self._lost_at:
                raise RunError(f"{sender}: {failure.error}")  # its engine did not even start
            self._lose(generator, failure.error, ended=True)
        elif sender in self._stores and not sender.startswith("trainer"):
            self._lose_store(sender, failure.error)
        else:
            raise RunError(f"{sender}: {failure.error}")

    def _lose(
        self, generator: GeneratorState, reason: str, *, ended: bool, counts: bool = True
    ) -> None:
        name = generator.name
        self._generators.remove(name)
        if ended:
            self._connection.end(name)
        attempts = self._config.fleet.group_attempts if counts else 0
        begun, again = list[int](), 0
        for (version, index), indices in generator.work.items():
            if version >= 0:
                self._evaluations.lost(version, index, indices)
                again += len(indices)
            elif (group := self._groups.get(index)) is not None:
                begun += [group.begun[i].num_tokens for i in indices if i in group.begun]
                again += sum(i not in group.begun for i in indices)
                if self._groups.lost(index, indices, attempts) is not None:
                    self._metrics.group_failed(index, group.prompt_id, attempts)
        if counts:
            self._lost_at[name], self._last_failure = time.monotonic(), reason
        self._metrics.generator_lost(generator, reason, again, begun, lost=counts)

    def _lose_store(self, name: str, reason: str) -> None:
        self._stores.remove(name)
        self._connection.end(name)
        work = "a generator of its node restarts it"
        print(f"warning: {name} is lost: {reason}; {work}", file=sys.stderr)

    def check(self, now: float) -> None:
        """Find out who is lost.

        Raises:
            RunError: there is no generator, or a trainer's store is not there.
            TrainerGone: a trainer rank does not run; rank 0 was killed.
        """
        last_frame, closed = self._connection.heard, self._connection.closed
        for generator, reason in self._generators.check(now, last_frame, closed):
            self._lose(generator, reason, ended=True)
        for name, reason in self._stores.check(now, last_frame, closed):
            self._lose_store(name, reason)
        for node in self._stores.bare_nodes(now, self._generators.nodes):
            limit = self._config.timeouts.startup_seconds
            reason = f"its node had no store for timeouts.startup_seconds = {limit:g}"
            for generator in [g for g in self._generators if g.node == node]:
                self._lose(generator, reason, ended=True)
        self._check_alone(now)
        # A rank that has closed its connection has ended, or is torchrun's to restart.
        for name in self._trainer_ranks.keys() - closed.keys():
            self._check_trainer(name, now - last_frame.get(name, now))

    def _check_alone(self, now: float) -> None:
        if len(self._generators):
            self._alone_since = now
        limit = self._config.timeouts.startup_seconds
        if now - self._alone_since > limit:
            cause = f"; the last one ended with: {self._last_failure}" if self._last_failure else ""
            raise RunError(
                f"no generator has come within timeouts.startup_seconds = {limit:g}{cause}; start"
                f" some (megatron-rl generate --join {self._config.output_dir}), or see their logs"
            )

    def _check_trainer(self, name: str, silent: float) -> None:
        limit = self._config.timeouts.silence_seconds
        rank = name.removeprefix(m.TRAINER).removeprefix("-") or "0"
        if silent <= limit:
            self._trainer_ranks[name] = 0.0
        elif not self._trainer_ranks[name]:
            self._trainer_ranks[name] = time.monotonic()
            self._metrics.sink.note(
                f"trainer rank {rank} is silent for {silent:.0f} s (timeouts.silence_seconds): its"
                " process is stopped, or its node is gone"
            )
        elif silent > self._config.timeouts.hang_seconds:
            # Rank 0 may wait for the silent one in a collective; torchrun restarts all.
            if os.getppid() == self._parent:
                os.kill(self._parent, signal.SIGKILL)
            raise TrainerGone(
                f"trainer rank {rank} was silent for {silent:.0f} s: rank 0 was killed, so that"
                " torchrun restarts the trainer's ranks"
            )

    def names(self) -> list[str]:
        """Return the names of all generators and stores."""
        return [peer.name for peer in (*self._generators, *self._stores)]
