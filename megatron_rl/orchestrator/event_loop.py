"""The orchestrator's event loop: one ROUTER socket, one handler per message (`_handle`).

One step of a run, in the order of its calls:

    _dispatch           Generate -> the least busy generator, while the schedule allows it;
                        first what a lost generator had (`membership`)
    _receive_sample     Sample <- generator; `_verify` and `_record_verdict` complete its group
    _answer_trainer     Batch -> trainer, once the groups of the requested step are complete
    _record_step        StepDone <- trainer; a row of metrics.jsonl
    _publish_version    Published <- trainer
    _move_weights       TakeVersion -> stores, UpdateWeights -> generators (`stores`)
    _finish_update      WeightsUpdated <- generator; an evaluation of this version may start

Groups are trained in dispatch order, regardless of which finishes first: group i in step
`GroupQueue.latest_step(i)` at the latest. It is dispatched to a generator of version s only if the
schedule lets version s sample for that step: `latest_step(i) <= s + k` for PipelineRL-k. No token
can then be older than k steps when it is trained: generators wait when they are k steps ahead, and
the trainer waits for its groups.

The trainer's stores have two versions: that of step s + 1 replaces that of step s - 1. The batch of
step s is given once no peer reads a version before s any more (`_is_free`).
"""

import os
import sys
import time
from pathlib import Path

import zmq.asyncio

from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.data import PromptSet
from megatron_rl.metrics.alarms import diagnosis
from megatron_rl.orchestrator import RunError, TrainerGone
from megatron_rl.orchestrator.batching import BuiltBatch, is_dropped
from megatron_rl.orchestrator.child_process import EvaluateOnly
from megatron_rl.orchestrator.connection import Connection
from megatron_rl.orchestrator.evaluation import Evaluations
from megatron_rl.orchestrator.generators import Generators, GeneratorState
from megatron_rl.orchestrator.groups import Group, GroupQueue
from megatron_rl.orchestrator.membership import Membership
from megatron_rl.orchestrator.run_metrics import RunMetrics
from megatron_rl.orchestrator.state import State, restored_groups, save_state, saved_groups
from megatron_rl.orchestrator.steps import StepBuilder
from megatron_rl.orchestrator.stores import Stores
from megatron_rl.orchestrator.verification import Verification
from megatron_rl.rewards import Verdict

TICK_SECONDS = 0.5
EVENTS_AT_ONCE = 50  # most events that are handled before their consequences are seen to
STOP_SECONDS = 2.0  # longest wait for the answers to `Stop`: a peer may have ended already


class Orchestrator:
    """Dispatch, verification, batches, evaluations and state of one run.

    The socket is a bound ROUTER, the verifiers run. `state` resumes a checkpoint, `evaluate_only`
    evaluates the generators' first version, without a trainer. `Welcome` has the last two.
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
        *,
        model_dir: str = "",
        trainer_node: str = "",
    ) -> None:
        self.config, self.prompts, self.verification = config, prompts, verification
        self.metrics, self.connection = metrics, Connection(socket, self._handle)
        per_step, a = config.schedule.prompts_per_step, config.algorithm
        self.groups = GroupQueue(per_step, lambda group: a.refill and is_dropped(group, a))
        self.generators, self.stores = Generators(config), Stores(config)
        self._weights_can_move = self._work_can_move = True
        self._evaluation_share = 0.0
        self._oldest_read: int | None = None
        self._score_requests: dict[int, m.ScoreRequest] = {}
        self.requested_step: int | None = None
        self._state_saved: m.StateSaved | None = None
        self.trainer_done: m.TrainerDone | None = None
        self._evaluate_only = evaluate_only
        if evaluate_only is None:
            self.steps = StepBuilder(config, prompts, metrics.recorder)
        if state is not None:
            self._restore(state)
        self._first_step = first_step = self.groups.trained_steps
        self.evaluations = Evaluations(config, prompts, metrics, first_step, evaluate_only)
        as_json = config.model_dump(mode="json")
        as_json["output_dir"] = str(config.output_dir.absolute())  # theirs may be another folder
        self.membership = Membership(
            config,
            m.Welcome(config=as_json, model_dir=model_dir, trainer_node=trainer_node),
            self.connection, self.generators, self.stores, self.groups, self.evaluations, metrics,
            evaluate_only=evaluate_only is not None,
        )  # fmt: skip

    async def run(self) -> m.TrainerDone:
        """Serve until the trainer is done and every evaluation is complete.

        Raises:
            RunError: the run cannot go on.
            VerifierError: a verifier failed.
            TrainerGone: the parent process is gone, or a trainer rank does not run any more.
        """
        parent, next_check = os.getppid(), 0.0
        self.evaluations.reach(self._first_step)
        if self._evaluate_only:
            self._end_training(m.TrainerDone(step=0, interrupted=False))
        async with self.connection:
            for group in self.groups.waiting:  # a resumed run: verdicts that were missing
                for sample in group.ordered:
                    if sample.index not in group.verdicts:
                        self._verify(sample)
            while not self._is_over():
                event = await self.connection.next_event(TICK_SECONDS)
                self._advance_clock()
                count = 0
                while event is not None:
                    event()
                    count += 1
                    event = self.connection.waiting_event() if count < EVENTS_AT_ONCE else None
                if (now := time.monotonic()) >= next_check:
                    next_check = now + TICK_SECONDS
                    if os.getppid() != parent:
                        raise TrainerGone("trainer rank 0 is gone; its log has the cause")
                    self.membership.check(now)
                    self._weights_can_move = self._work_can_move = True
                if self._weights_can_move:
                    self._evaluate()
                    self._weights_can_move = False
                    self._move_weights()
                if self._work_can_move:
                    self._work_can_move = False
                    self._dispatch()
                    self._answer_trainer()
                    self._evaluation_share = self.generators.evaluation_share
                await self.connection.flush()
        assert self.trainer_done is not None
        return self.trainer_done

    async def stop_peers(self) -> None:
        """Tell every generator and store to stop; their starters wait for them."""
        names = self.membership.names()
        for name in names:
            self.connection.send(name, m.Stop())
        await self.connection.finish(names, STOP_SECONDS)

    def _is_over(self) -> bool:
        done, limit = self.trainer_done, self.config.timeouts.evaluation_seconds
        if done is None or done.interrupted or not self.evaluations.running:
            return done is not None
        if time.monotonic() - self._done_at > limit:
            raise RunError(
                f"the evaluation of step {min(self.evaluations.steps)} did not end within"
                f" timeouts.evaluation_seconds = {limit:g}: raise it, or take fewer samples"
                " (evaluation.samples_per_prompt)"
            )
        return False

    def _advance_clock(self) -> None:
        """Count the time since the last event, in which the work in flight was as it is now."""
        over = self.trainer_done is not None
        share = 1.0 if over else self._evaluation_share
        ready = self.metrics.engines_ready = len(self.generators.ready)
        self.metrics.engines = max(self.generators.expected, ready)
        self.metrics.advance(share, over or self.requested_step is not None)

    def _handle(self, sender: str, message: m.Message) -> None:
        self.generators.message_from(sender, time.monotonic())
        if not isinstance(message, m.GeneratorStats | m.Grown):  # nearly all messages
            self._work_can_move = True
            self._weights_can_move |= not isinstance(message, m.Sample)
        match message:
            case m.Join():
                self.membership.join(sender, message)
            case m.Hello():
                self.membership.hello(sender, message)
            case m.Failed():
                self.membership.failed(sender, message)
            case m.Published():
                self._publish_version(message)
            case m.BatchRequest():
                self.requested_step = message.step
            case m.StepDone():
                self._record_step(message)
            case m.SaveState():
                self._save_state(message)
            case m.TrainerDone():
                self._end_training(message)
            case m.StoreMemory() | m.VersionTaken() | m.SourceFailed() if sender not in self.stores:
                pass  # it was lost
            case m.StoreMemory():
                self.stores.mapped(sender, message.source)
            case m.VersionTaken():
                self.metrics.version_taken(*self.stores.taken(sender, message))
            case m.SourceFailed():
                print(f"warning: {self.stores.failed(sender, message)}", file=sys.stderr)
            case _ if sender not in self.generators:
                if not sender.startswith("generator"):  # else a lost one had sent it
                    raise _unexpected(sender, message)
            case m.WeightsUpdated():
                self._finish_update(sender, message)
            case m.Sample():
                self._receive_sample(sender, message)
            case m.Grown():
                self._receive_beginning(sender, message)
            case m.RolloutFailed():
                self.membership.rollout_failed(sender, message)
            case m.Scores():
                self.metrics.scored(message)
            case m.GeneratorStats():
                self.metrics.generator_stats(sender, message)
            case m.Leaving():
                self.membership.leaving(sender)
            case m.Left():
                self.membership.left(sender)
            case _:
                raise _unexpected(sender, message)

    def _publish_version(self, published: m.Published) -> None:
        manifest = published.manifest
        self.metrics.publish_seconds = published.seconds
        self.stores.publish(manifest)
        self.generators.publish(manifest, self.evaluations.steps | self.stores.versions)

    def _evaluate(self) -> None:
        for generator, request in self.evaluations.requests(self.generators):
            self._send_work(generator, request)

    def _move_weights(self) -> None:
        keep, now = self.evaluations.wanted(self.generators), time.monotonic()
        for name, update in self.generators.updates(keep, self.stores.folder, now):
            self.connection.send(name, update)
        for name, request in self.stores.requests(self.generators, keep):
            self.connection.send(name, request)
        read = self.generators.oldest_read(keep), self.stores.oldest_taken()
        self._oldest_read = min((v for v in read if v is not None), default=None)
        self.evaluations.move(self.generators, self.stores.readable_from, self.stores.newest)

    def _is_free(self, step: int) -> bool:
        """Return True if the weights before `step` may be overwritten."""
        if step > self._first_step and self.stores.newest < step - 1:
            return False  # its readers are not known yet
        return self._oldest_read is None or self._oldest_read >= step

    def _finish_update(self, sender: str, updated: m.WeightsUpdated) -> None:
        self.membership.updated(sender, updated)
        self.metrics.updates.append(updated)
        self.metrics.start_clock()

    def _send_work(self, generator: GeneratorState, request: m.Generate) -> None:
        self.metrics.start_clock()
        generator.give((request.evaluation, request.group), request.indices)
        self.metrics.recorder.sent(request)
        self.connection.send(generator.name, request)

    def _dispatch(self) -> None:
        s = self.config.schedule
        while not self.verification.full:
            step = self.groups.latest_step(self.groups.next_to_dispatch)
            if step >= s.steps or self.trainer_done is not None:
                return
            oldest = s.oldest_version(step)
            if (generator := self.generators.free(oldest)) is None:
                return
            group, indices = self.groups.dispatch(self.steps.stream.next, self._new_group)
            self._send_work(generator, self.steps.request(group, indices, oldest))

    def _new_group(self, index: int, prompt_id: int) -> Group:
        size, values = self.config.schedule.completions_per_prompt, self.config.verifier.values
        return Group(index, prompt_id, size, self.prompts.train[prompt_id].task, values)

    def _receive_sample(self, sender: str, sample: m.Sample) -> None:
        generator = self.generators[sender]
        if not generator.took((sample.evaluation, sample.group), sample.index):
            return
        self.membership.let_go(generator)
        self.metrics.recorder.arrived(sender, sample)
        if sample.evaluation >= 0:
            self.evaluations.arrived(sample)
            self._weights_can_move = True
        elif (group := self.groups.get(sample.group)) is None:
            return  # it has failed
        else:
            group.samples[sample.index] = sample
            group.begun.pop(sample.index, None)
        self._verify(sample)

    def _receive_beginning(self, sender: str, grown: m.Grown) -> None:
        group, work = self.groups.get(grown.group), self.generators[sender].work
        if group is not None and grown.index in work.get((-1, grown.group), ()):
            group.grow(grown)

    def _verify(self, sample: m.Sample) -> None:
        """Record the verdict now, or as an event (which raises the verifier's error)."""
        prompts = self.prompts.train if sample.evaluation < 0 else self.evaluations.prompts
        verdict = self.verification.start(prompts[sample.prompt_id], sample)
        if isinstance(verdict, Verdict):
            self._record_verdict(sample, verdict)
        else:
            post, record = self.connection.post, self._record_verdict
            verdict.add_done_callback(lambda task: post(lambda: record(sample, task.result())))

    def _record_verdict(self, sample: m.Sample, verdict: Verdict) -> None:
        self._work_can_move = True
        self.metrics.recorder.verified(sample)
        if sample.evaluation >= 0:
            self.evaluations.verified(sample, verdict)
        elif (group := self.groups.get(sample.group)) is not None:
            group.verdicts[sample.index] = verdict
            self.groups.verified(group)

    def _answer_trainer(self) -> None:
        # A resumed run writes no files of the steps before its checkpoint: they are there first.
        if self._state_saved is not None and not self.metrics.recorder.behind(1):
            self.connection.send(m.TRAINER, self._state_saved)
            self._state_saved = None
        if (step := self.requested_step) is None:
            return
        if step >= self.config.schedule.steps:
            batch = m.Batch(step=step, stop=True)
        elif not self._is_free(step):
            return
        else:
            while (built := self.steps.build(step, self.groups)) is not None and not built.teaches:
                self._skip_batch(step, built)
            if built is None:
                return
            self.stores.batch_given(step)
            self._score_requests[step] = built.probe
            self.metrics.batch(step, built.metrics)
            batch = built.batch
        self.requested_step = None
        self.metrics.start_clock()  # a resumed run may have the batch already
        self.connection.send(m.TRAINER, batch)

    def _skip_batch(self, step: int, built: BuiltBatch) -> None:
        """Drop a batch that teaches nothing; the next groups are those of the step."""
        self.steps.record(self.groups.consume(step, trained=False))
        count = self.metrics.empty_batch(step, built.metrics)
        if count >= self.config.schedule.max_empty_batches:
            raise RunError(
                f"step {step}: {count} batches in a row had nothing to learn"
                f" (schedule.max_empty_batches): {diagnosis(built.metrics)}"
            )
        self.connection.send(m.TRAINER, m.BatchSkipped(step=step))

    def _record_step(self, done: m.StepDone) -> None:
        self.steps.record(self.groups.consume(done.step))
        self.metrics.step(done, self.verification.metrics)
        holders = [g.name for g in self.generators if g.reads(done.step)]
        if (request := self._score_requests.pop(done.step)).prompts and holders:
            self.metrics.score_requested(done)
            self.connection.send(holders[0], request)
        self.evaluations.reach(self.groups.trained_steps)

    def _end_training(self, done: m.TrainerDone) -> None:
        self.trainer_done, self._done_at = done, time.monotonic()

    def _save_state(self, request: m.SaveState) -> None:
        state = State(
            step=request.step, consumed=self.groups.consumed,
            fingerprint=self.prompts.fingerprint, sets=self.prompts.set_fingerprints,
            prompts_per_step=self.config.schedule.prompts_per_step,
            groups=saved_groups(self.groups.waiting), curriculum=self.steps.stream.state(),
            compute=self.metrics.compute(), aborted=self.metrics.aborted,
        )  # fmt: skip
        save_state(state, Path(request.directory))
        self._state_saved = m.StateSaved(step=request.step)

    def _restore(self, state: State) -> None:
        self.steps.stream.restore(state.curriculum)
        self.steps.first_step = state.step
        self.metrics.restore(state.compute, state.aborted)
        self.metrics.trained_steps = state.step
        routed = self.config.algorithm.routing_replay != "none"
        groups = restored_groups(state, self._new_group, routed)
        self.groups.restore(state.step, state.consumed, groups)


def _unexpected(sender: str, message: m.Message) -> RunError:
    return RunError(f"unexpected message {type(message).__name__} from {sender}")
