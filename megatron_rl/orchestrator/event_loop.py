"""The orchestrator's event loop: one ROUTER socket, one handler per message (`_handle`).

One step of a run, in the order of its calls:

    _dispatch           Generate -> the least busy generator, while the schedule allows it
    _receive_sample     Sample <- generator; `_verify` and `_record_verdict` complete its group
    _answer_batch       Batch -> trainer, once the groups of the requested step are complete
    _record_step        StepDone <- trainer; a row of metrics.jsonl
    _publish_version    Published <- trainer; `_advance` sends UpdateWeights -> generators
    _finish_update      WeightsUpdated <- generator; an evaluation of this version starts

Groups are trained in dispatch order, regardless of which finishes first. With v the next step, c
the first group that no step took yet, and B prompts per step, group i is trained in step
`v + (i - c) // B` at the latest (refilled groups are not counted). It is dispatched to a generator
of version s only if the schedule lets version s sample for that step: `v + (i - c) // B <= s + k`
for PipelineRL-k. No token can then be older than k steps when it is trained: generators wait when
they are k steps ahead, and the trainer waits for its groups.

Verdicts of the verifier pool are events like messages. Dispatch waits while the pool is behind.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import zmq.asyncio

from megatron_rl import messages as m
from megatron_rl.algorithm.length_control import thinking_budgets
from megatron_rl.config import RunConfig
from megatron_rl.data import PromptSet
from megatron_rl.messages import TRAINER
from megatron_rl.orchestrator import RunError
from megatron_rl.orchestrator.batching import is_dropped
from megatron_rl.orchestrator.child_process import EvaluateOnly
from megatron_rl.orchestrator.connection import Connection
from megatron_rl.orchestrator.evaluation import Evaluations
from megatron_rl.orchestrator.generators import Generators, GeneratorState
from megatron_rl.orchestrator.groups import Group, GroupQueue
from megatron_rl.orchestrator.run_metrics import RunMetrics
from megatron_rl.orchestrator.state import State, restored_groups, save_state, saved_groups
from megatron_rl.orchestrator.steps import StepBuilder
from megatron_rl.orchestrator.verification import Verification
from megatron_rl.rewards import Verdict

TICK_SECONDS = 0.5


class Orchestrator:
    """Dispatch, verification, batches, evaluations and state of one run.

    The socket is a bound ROUTER, and the verifiers are started. `state` resumes a checkpoint;
    `evaluate_only` evaluates the version that the generators start with, without a trainer.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSet,
        verification: Verification,
        metrics: RunMetrics,
        socket: zmq.asyncio.Socket,
        state: State | None = None,
        evaluate_only: EvaluateOnly | None = None,
    ) -> None:
        self.config, self.prompts, self.verification = config, prompts, verification
        self.metrics, self.connection = metrics, Connection(socket, self._handle)
        a = config.algorithm
        self.groups = GroupQueue(
            config.schedule.prompts_per_step, lambda group: a.refill and is_dropped(group, a)
        )
        self.generators = Generators(config)
        self._score_requests: dict[int, m.ScoreRequest] = {}
        self.requested_step: int | None = None
        self.trainer_done: m.TrainerDone | None = None
        self._evaluate_only = evaluate_only
        if evaluate_only is None:
            self.steps = StepBuilder(config, prompts)
        if state is not None:
            self._restore(state)
        first_step = self.groups.trained_steps
        self.evaluations = Evaluations(config, prompts.heldout, metrics, first_step, evaluate_only)

    # ------------------------------------------------------------ event loop

    async def run(self) -> m.TrainerDone:
        """Serve until the trainer is done and every evaluation is complete.

        Raises:
            RunError: a role failed or fell silent, or the parent process is gone.
            VerifierError: a verifier failed.
        """
        parent = os.getppid()
        if self._evaluate_only:
            self.evaluations.published(0)
            self._end_training(m.TrainerDone(step=0, interrupted=False))
        async with self.connection:
            for group in self.groups.waiting:  # a resumed run: verdicts that were missing
                for sample in group.ordered:
                    if sample.index not in group.verdicts:
                        self._verify(sample)
            while not self._is_over():
                event = await self.connection.next_event(TICK_SECONDS)
                if event is not None:
                    event()
                    self._advance()
                    await self.connection.flush()
                if os.getppid() != parent:
                    raise RunError("trainer rank 0 is gone; its log has the cause")
                self.generators.check(time.monotonic())
        assert self.trainer_done is not None
        return self.trainer_done

    async def stop_generators(self) -> None:
        """Tell every generator to stop; the process that started them waits for them."""
        for generator in self.generators:
            self.connection.send(generator.name, m.Stop())
        await self.connection.flush()

    def _is_over(self) -> bool:
        done, limit = self.trainer_done, self.config.timeouts.evaluation_seconds
        if done is None:
            return False
        if done.interrupted or not self.evaluations.running:
            return True
        if time.monotonic() - self._done_at > limit:
            raise RunError(
                f"the evaluation of step {min(self.evaluations.running)} did not end within"
                f" timeouts.evaluation_seconds = {limit:g}: raise it, or take fewer samples"
                " (evaluation.samples_per_prompt)"
            )
        return False

    def _handle(self, sender: str, message: m.Message) -> None:
        self.generators.message_from(sender)
        match message:
            case m.Hello():
                self._add_peer(sender, message)
            case m.Published():
                self._publish_version(message)
            case m.WeightsUpdated():
                self._finish_update(sender, message)
            case m.Sample():
                self._receive_sample(sender, message)
            case m.BatchRequest():
                self.requested_step = message.step
            case m.StepDone():
                self._record_step(message)
            case m.Scores():
                self.metrics.scored(message)
            case m.SaveState():
                self._save_state(message)
            case m.GeneratorStats():
                self.metrics.generator_stats(sender, message)
            case m.TrainerDone():
                self._end_training(message)
            case m.Failed():
                raise RunError(f"{sender}: {message.error}")
            case _:
                raise RunError(f"unexpected message {type(message).__name__} from {sender}")

    def _advance(self) -> None:
        """Do all that an event may have made possible: updates, dispatch, the next batch."""
        for generator in self.generators:
            update = generator.next_update()
            if update is not None:
                self.connection.send(generator.name, m.UpdateWeights(manifest=update))
        self._dispatch()
        self._answer_batch()

    # ------------------------------------------------------------ peers and weights

    def _add_peer(self, sender: str, hello: m.Hello) -> None:
        if hello.protocol != m.PROTOCOL:
            raise RunError(
                f"{sender} speaks protocol {hello.protocol}, this is {m.PROTOCOL}: install the same"
                " version of megatron_rl on every rank"
            )
        if hello.role == TRAINER:
            self.metrics.active_parameters = hello.active_parameters
            return
        generator = self.generators.add(sender, hello.capacity, self.evaluations.steps)
        if self.generators.all_up:
            self.metrics.start_clock()
        if self._evaluate_only:
            generator.version = hello.version
            self._start_evaluation(generator)

    def _publish_version(self, published: m.Published) -> None:
        self.metrics.published(published)
        self.evaluations.published(published.manifest.version)
        self.generators.publish(published.manifest, self.evaluations.steps)

    def _finish_update(self, sender: str, updated: m.WeightsUpdated) -> None:
        generator = self.generators[sender]
        if generator.updating is None or generator.updating.version != updated.version:
            raise RunError(f"{sender} acknowledged version {updated.version}, which was not sent")
        generator.updating, generator.version = None, updated.version
        self.metrics.updated(updated)
        self._start_evaluation(generator)

    def _start_evaluation(self, generator: GeneratorState) -> None:
        for request in self.evaluations.start(generator):
            self.connection.send(generator.name, request)

    # ------------------------------------------------------------ generation and verdicts

    def _dispatch(self) -> None:
        s, g = self.config.schedule, self.config.generation
        while not self.verification.full:
            self.groups.skip_finished()
            step = self.groups.next_step
            if step >= s.steps or self.trainer_done is not None:
                return
            generator = self.generators.free(s.oldest_version(step))
            if generator is None:
                return
            group = self.groups.dispatch(self.steps.stream.next, self._new_group)
            generator.in_flight += group.size
            self.connection.send(
                generator.name,
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

    def _new_group(self, index: int, prompt_id: int) -> Group:
        size, values = self.config.schedule.completions_per_prompt, self.config.verifier.values
        return Group(index, prompt_id, size, self.prompts.train[prompt_id].task, values)

    def _receive_sample(self, sender: str, sample: m.Sample) -> None:
        generator = self.generators[sender]
        generator.in_flight -= 1
        if sample.evaluation < 0:
            self.groups[sample.group].samples[sample.index] = sample
        else:
            self.evaluations.arrived(generator, sample)
        self._verify(sample)

    def _verify(self, sample: m.Sample) -> None:
        """Record the verdict now, or as an event (which raises the verifier's error)."""
        prompts = self.prompts.train if sample.evaluation < 0 else self.prompts.heldout
        verdict = self.verification.start(prompts[sample.prompt_id], sample)
        if isinstance(verdict, Verdict):
            self._record_verdict(sample, verdict)
        else:
            post, record = self.connection.post, self._record_verdict
            verdict.add_done_callback(lambda task: post(lambda: record(sample, task.result())))

    def _record_verdict(self, sample: m.Sample, verdict: Verdict) -> None:
        if sample.evaluation < 0:
            group = self.groups[sample.group]
            group.verdicts[sample.index] = verdict
            self.groups.verified(group)
        else:
            self.evaluations.verified(sample, verdict)

    # ------------------------------------------------------------ training

    def _answer_batch(self) -> None:
        step = self.requested_step
        if step is None:
            return
        needed = self.generators.oldest_needed()
        if step >= self.config.schedule.steps:
            batch = m.Batch(step=step, stop=True, versions_needed_from=needed)
        else:
            built = self.steps.build(step, self.groups, needed)
            if built is None:
                return
            self._score_requests[step] = built.probe
            self.metrics.batch(step, built.metrics)
            batch = built.batch
        self.requested_step = None
        self.connection.send(TRAINER, batch)

    def _record_step(self, done: m.StepDone) -> None:
        for group in self.groups.consume(done.step):
            if (pass_rate := group.pass_rate) is not None:
                self.steps.stream.record(group.prompt_id, pass_rate)
        self.metrics.verifiers(self.verification)
        self.metrics.step(done)
        request = self._score_requests.pop(done.step)
        holders = [g.name for g in self.generators if g.version == done.step and not g.updating]
        if request.prompts and holders:
            self.metrics.score_requested(done)
            self.connection.send(holders[0], request)

    def _end_training(self, done: m.TrainerDone) -> None:
        self.trainer_done, self._done_at = done, time.monotonic()

    # ------------------------------------------------------------ state

    def _save_state(self, request: m.SaveState) -> None:
        state = State(
            step=request.step,
            fingerprint=self.prompts.fingerprint,
            prompts_per_step=self.config.schedule.prompts_per_step,
            consumed=self.groups.consumed,
            groups=saved_groups(self.groups.waiting),
            curriculum=self.steps.stream.state(),
            compute=self.metrics.counters(),
            wall_seconds=self.metrics.wall_seconds(),
            aborted=self.metrics.aborted,
        )
        save_state(state, Path(request.directory))
        self.connection.send(TRAINER, m.StateSaved(step=request.step))

    def _restore(self, state: State) -> None:
        self.steps.stream.restore(state.curriculum)
        self.steps.first_step = state.step
        self.metrics.restore(state.compute, state.wall_seconds, state.aborted)
        routed = self.config.algorithm.routing_replay != "none"
        groups = restored_groups(state, self._new_group, routed)
        self.groups.restore(state.step, state.consumed, groups)
