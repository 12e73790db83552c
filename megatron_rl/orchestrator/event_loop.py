"""The orchestrator's event loop: one ROUTER socket, one handler per message.

Groups are trained in the order of their dispatch, whatever finished first. With v the next step,
c the first group that no step took yet, and B prompts per step, group i is trained in step
`v + (i - c) // B` at the latest (dropped groups that are refilled don't count), and it is
dispatched to an engine of version s only when the schedule lets version s generate for that step:
`v + (i - c) // B <= s + k` for PipelineRL-k. No token can then be older than k steps when it is
trained; the generators wait when they are k steps ahead, and the trainer waits for its groups.

Everything that happens is an event in one queue: messages of the peers, and verdicts of the
verifier pool. When the pool is behind, nothing is dispatched until it is not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import zmq.asyncio

from megatron_rl import messages as m
from megatron_rl.algorithm.thinking_budget import thinking_budgets
from megatron_rl.config import RunConfig
from megatron_rl.data import Prompt, PromptSet
from megatron_rl.messages import TRAINER
from megatron_rl.orchestrator.batching import is_dropped
from megatron_rl.orchestrator.connection import Wire
from megatron_rl.orchestrator.errors import RunError
from megatron_rl.orchestrator.evaluations import Evaluations
from megatron_rl.orchestrator.generators import Engines
from megatron_rl.orchestrator.groups import Group, GroupQueue
from megatron_rl.orchestrator.meter import Meter
from megatron_rl.orchestrator.probe import Probe
from megatron_rl.orchestrator.state import State, restored_groups, save_state, saved_groups
from megatron_rl.orchestrator.steps import StepBuilder, prompt_stream
from megatron_rl.orchestrator.verification import Verification
from megatron_rl.rewards import Verdict

TICK_SECONDS = 0.5


class Orchestrator:
    """Dispatch, verification, batches, evaluations and state of one run.

    Args:
        config: the run's configuration.
        prompts: training and held-out prompts.
        verification: verifiers of these prompts, started.
        meter: metrics and their mirrors.
        socket: bound ROUTER socket.
        state: what a checkpoint kept, or None for a new run.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSet,
        verification: Verification,
        meter: Meter,
        socket: zmq.asyncio.Socket,
        state: State | None = None,
    ) -> None:
        self.config, self.prompts, self.verification = config, prompts, verification
        self.meter, self.wire = meter, Wire(socket, self._handle)
        a = config.algorithm
        self.groups = GroupQueue(
            config.schedule.prompts_per_step, lambda group: a.refill and is_dropped(group, a)
        )
        self.curriculum = prompt_stream(config, prompts)
        self.engines = Engines(config)
        self.probe = Probe(meter)
        if state is not None:
            self._restore(state)
        first_step = self.groups.trained_steps
        self.steps = StepBuilder(config, prompts, self.curriculum, first_step)
        self.evaluations = Evaluations(config, prompts, meter, first_step)
        self.requested_step: int | None = None
        self.trainer_done: m.TrainerDone | None = None
        self._done_at = 0.0

    # ------------------------------------------------------------ event loop

    async def run(self) -> m.TrainerDone:
        """Serve until the trainer is done and every evaluation is complete.

        Raises:
            RunError: a role failed or fell silent, or the parent process is gone.
            VerifierError: the verifiers cannot go on.
        """
        parent = os.getppid()
        async with self.wire:
            for group in self.groups.waiting:  # a resumed run's: verdicts that were not there yet
                for sample in group.unjudged:
                    self._judge_training(group, sample)
            while not self._is_over():
                event = await self.wire.next_event(TICK_SECONDS)
                if event is not None:
                    event()
                    self._advance()
                    await self.wire.flush()
                if os.getppid() != parent:
                    raise RunError("trainer rank 0 is gone; its log says why")
                self.engines.check(time.monotonic())
        assert self.trainer_done is not None
        return self.trainer_done

    async def stop_engines(self) -> None:
        """Tell every engine to end; it is the roles' launcher that waits for them."""
        for engine in self.engines:
            self.wire.send(engine.name, m.Stop())
        await self.wire.flush()

    def _is_over(self) -> bool:
        done, limit = self.trainer_done, self.config.timeouts.evaluation_seconds
        if done is None:
            return False
        if done.interrupted or not self.evaluations.running:
            return True
        if time.monotonic() - self._done_at > limit:
            raise RunError(
                f"evaluation of step {min(self.evaluations.running)} did not finish in"
                f" timeouts.evaluation_seconds = {limit}"
            )
        return False

    def _handle(self, sender: str, message: m.Message) -> None:
        self.engines.heard(sender)
        handler = getattr(self, f"_on_{type(message).__name__}", None)
        if handler is None:
            raise RunError(f"{sender} sent {type(message).__name__}, which is not for here")
        handler(sender, message)

    def _advance(self) -> None:
        """Everything that may have become possible: updates, dispatch, the trainer's batch."""
        for engine in self.engines:
            update = engine.next_update()
            if update is not None:
                self.wire.send(engine.name, m.UpdateWeights(manifest=update))
        self._dispatch()
        self._answer_batch()

    # ------------------------------------------------------------ peers and weights

    def _on_Hello(self, sender: str, hello: m.Hello) -> None:
        if hello.protocol != m.PROTOCOL:
            raise RunError(
                f"{sender} speaks protocol {hello.protocol}, this is {m.PROTOCOL}: install the same"
                " version of megatron_rl on every rank"
            )
        if hello.role == TRAINER:
            self.meter.active_parameters = hello.active_parameters
            return
        self.engines.add(sender, hello.capacity, self.evaluations.steps)
        if self.engines.all_up:
            self.meter.start_clock()

    def _on_Failed(self, sender: str, failed: m.Failed) -> None:
        raise RunError(f"{sender}: {failed.error}")

    def _on_GeneratorStats(self, sender: str, stats: m.GeneratorStats) -> None:
        self.meter.generator(sender, stats)

    def _on_Published(self, sender: str, published: m.Published) -> None:
        self.meter.published(published)
        self.evaluations.published(published.manifest.version)
        self.engines.publish(published.manifest, self.evaluations.steps)

    def _on_WeightsUpdated(self, sender: str, updated: m.WeightsUpdated) -> None:
        engine = self.engines[sender]
        if engine.updating is None or engine.updating.version != updated.version:
            raise RunError(f"{sender} acknowledged version {updated.version}, which was not sent")
        engine.updating, engine.version = None, updated.version
        self.meter.updated(updated)
        for request in self.evaluations.start(engine, self.engines.names, updated.version):
            self.wire.send(sender, request)

    # ------------------------------------------------------------ generation and verdicts

    def _dispatch(self) -> None:
        s, g = self.config.schedule, self.config.generation
        while not self.verification.full:
            self.groups.skip_finished()
            step = self.groups.next_step
            if step >= s.steps or self.trainer_done is not None:
                return
            engine = self.engines.free(s.oldest_version(step))
            if engine is None:
                return
            group = self.groups.dispatch(self.curriculum.next, self._group)
            engine.in_flight += group.size
            self.wire.send(
                engine.name,
                m.Generate(
                    group=group.index,
                    prompt_id=group.prompt_id,
                    prompt=self.prompts.train[group.prompt_id].token_ids,
                    thinking_budgets=thinking_budgets(
                        self.config.seed, group.index, group.size, g.thinking_budget_tokens
                    ),
                    answer_budget=g.answer_budget_tokens,
                    temperature=g.temperature,
                ),
            )

    def _group(self, index: int, prompt_id: int) -> Group:
        size, values = self.config.schedule.completions_per_prompt, self.config.verifier.values
        return Group(index, prompt_id, size, self.prompts.train[prompt_id].task, values)

    def _on_Sample(self, sender: str, sample: m.Sample) -> None:
        engine = self.engines[sender]
        engine.in_flight -= 1
        if sample.evaluation < 0:
            group = self.groups[sample.group]
            group.samples[sample.index] = sample
            self._judge_training(group, sample)
            return
        self.evaluations.arrived(engine, sample)
        self._judge(
            self.prompts.heldout[sample.prompt_id],
            sample,
            lambda verdict: self.evaluations.judged(sample, verdict.verdict),
        )

    def _judge_training(self, group: Group, sample: m.Sample) -> None:
        def judged(verdict: Verdict) -> None:
            group.verdicts[sample.index] = verdict
            self.groups.arrived(group)

        self._judge(self.prompts.train[group.prompt_id], sample, judged)

    def _judge(self, prompt: Prompt, sample: m.Sample, then: Callable[[Verdict], None]) -> None:
        """`then` gets the verdict: at once, or as an event of its own."""
        found = self.verification.start(prompt, sample)
        if isinstance(found, Verdict):
            then(found)
        else:  # an error of the verifiers is raised where the event is handled: it ends the run
            found.add_done_callback(lambda task: self.wire.post(lambda: then(task.result())))

    # ------------------------------------------------------------ training

    def _on_BatchRequest(self, sender: str, request: m.BatchRequest) -> None:
        self.requested_step = request.step

    def _answer_batch(self) -> None:
        step = self.requested_step
        if step is None:
            return
        needed = self.engines.oldest_needed()
        if step >= self.config.schedule.steps:
            batch = m.Batch.stopping(step, versions_needed_from=needed)
        else:
            built = self.steps.build(step, self.groups, needed)
            if built is None:
                return
            self.probe.sent(step, built.probe)
            self.meter.batch(step, built.metrics)
            batch = built.batch
        self.requested_step = None
        self.wire.send(TRAINER, batch)

    def _on_StepDone(self, sender: str, done: m.StepDone) -> None:
        for group in self.groups.consume(done.step):
            if (pass_rate := group.pass_rate) is not None:
                self.curriculum.record(group.prompt_id, pass_rate)
        self.meter.verifiers(self.verification)
        self.meter.step(done)
        asked = self.probe.trained(done, self.engines)
        if asked is not None:
            self.wire.send(*asked)

    def _on_Scores(self, sender: str, scores: m.Scores) -> None:
        self.probe.scored(scores)

    # ------------------------------------------------------------ state

    def _on_SaveState(self, sender: str, request: m.SaveState) -> None:
        state = State(
            step=request.step,
            fingerprint=self.prompts.fingerprint,
            prompts_per_step=self.config.schedule.prompts_per_step,
            next_group=self.groups.next_index,
            consumed=self.groups.consumed,
            groups=saved_groups(self.groups.waiting),
            curriculum=self.curriculum.state(),
            compute=self.meter.counters(),
            wall_seconds=self.meter.wall_seconds(),
            aborted=self.meter.aborted,
        )
        save_state(state, Path(request.directory))
        self.wire.send(TRAINER, m.StateSaved(step=request.step))

    def _restore(self, state: State) -> None:
        self.curriculum.restore(state.curriculum)
        self.meter.restore(state.compute, state.wall_seconds, state.aborted)
        routed = self.config.algorithm.routing_replay != "none"
        groups = restored_groups(state, self._group, routed)
        self.groups.restore(state.step, state.consumed, groups)

    def _on_TrainerDone(self, sender: str, done: m.TrainerDone) -> None:
        self.trainer_done, self._done_at = done, time.monotonic()
