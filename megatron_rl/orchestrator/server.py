"""The orchestrator's event loop: one ROUTER socket, one handler per message.

Groups are trained in the order of their dispatch, whatever finished first. With v the next step,
c the first group that no step took yet, and B prompts per step, group i is trained in step
`v + (i - c) // B` at the latest (dropped groups that are refilled don't count), and it is
dispatched to an engine of version s only when the schedule lets version s generate for that step:
`v + (i - c) // B <= s + k` for PipelineRL-k. No token can then be older than k steps when it is
trained; the generators wait when they are k steps ahead, and the trainer waits for its groups.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from megatron_rl import messages as m
from megatron_rl.algorithm.curriculum import Curriculum
from megatron_rl.algorithm.interruption import thinking_budgets
from megatron_rl.config import RunConfig
from megatron_rl.data import Prompt, PromptSet
from megatron_rl.messages import TRAINER
from megatron_rl.orchestrator.batching import build_batch, is_dropped
from megatron_rl.orchestrator.engines import NO_VERSION, Engine
from megatron_rl.orchestrator.evaluation import EvaluationRun, evaluation_steps
from megatron_rl.orchestrator.groups import Group, GroupQueue
from megatron_rl.orchestrator.meter import Meter
from megatron_rl.orchestrator.state import SavedGroup, State, save_state
from megatron_rl.rewards import Verdict

PROBE_SEQUENCES = 4
SILENCE_SECONDS = 120.0
TICK_SECONDS = 0.5


class RunError(RuntimeError):
    """The run cannot go on; the message names the role and the remedy."""


class Orchestrator:
    """Dispatch, verification, batches, evaluations and state of one run.

    Args:
        config: the run's configuration.
        prompts: training and held-out prompts.
        verify: verdict on a sample, given its prompt.
        meter: metrics and their mirrors.
        socket: bound ROUTER socket.
        state: what a checkpoint kept, or None for a new run.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSet,
        verify: Callable[[Prompt, m.Sample], Verdict],
        meter: Meter,
        socket: zmq.asyncio.Socket,
        state: State | None = None,
    ) -> None:
        self.config, self.prompts, self.verify = config, prompts, verify
        self.meter, self.socket = meter, socket
        self.engines: dict[str, Engine] = {}
        a = config.algorithm
        self.groups = GroupQueue(
            config.schedule.prompts_per_step, lambda group: a.refill and is_dropped(group, a)
        )
        self.requested_step: int | None = None
        self.manifests: dict[int, m.Manifest] = {}
        self.evaluations: dict[int, EvaluationRun] = {}
        self.probed: dict[int, list[tuple[list[int], m.Sample]]] = {}
        self.probe_logprobs: dict[int, list[list[float]]] = {}
        self.trainer_done: m.TrainerDone | None = None
        self.first_step = 0
        self._outbox: list[tuple[str, m.Message]] = []
        self.curriculum = Curriculum(
            len(prompts.train),
            config.seed,
            threshold=a.no_positive_resampling_threshold if a.no_positive_resampling else None,
            statistic=a.no_positive_resampling_statistic,
            at_least=config.schedule.prompts_per_step,
        )
        if state is not None:
            self._restore(state)
        steps = evaluation_steps(config.evaluation, config.schedule.steps)
        self.evaluation_steps = {s for s in steps if s not in meter.evaluated_steps}
        self.evaluation_steps = {s for s in self.evaluation_steps if s >= self.first_step}
        self._prompt_ids = {p.id: p.token_ids for p in prompts.train}

    # ------------------------------------------------------------ event loop

    async def run(self) -> m.TrainerDone:
        """Serve until the trainer is done and every evaluation is complete.

        Raises:
            RunError: a role failed or fell silent, or the parent process is gone.
        """
        parent, deadline = os.getppid(), None
        started = time.monotonic()
        while True:
            if await self.socket.poll(int(TICK_SECONDS * 1000)):
                identity, data = await self.socket.recv_multipart()
                self._handle(identity.decode(), m.decode(data))
                await self._flush()
            now = time.monotonic()
            if os.getppid() != parent:
                raise RunError("trainer rank 0 is gone; its log says why")
            if self.trainer_done is not None:
                deadline = deadline or now + self.config.timeouts.evaluation_seconds
                if self.trainer_done.interrupted or not self.evaluations:
                    return self.trainer_done
                if now > deadline:
                    raise RunError(
                        f"evaluation of step {min(self.evaluations, default=-1)} did not finish in"
                        f" timeouts.evaluation_seconds = {self.config.timeouts.evaluation_seconds}"
                    )
            self._check_silence(now, started)

    async def stop_engines(self) -> None:
        """Tell every engine to end; it is the roles' launcher that waits for them."""
        for name in self.engines:
            self._send(name, m.Stop())
        await self._flush()

    def _check_silence(self, now: float, started: float) -> None:
        limit = max(SILENCE_SECONDS, self.config.timeouts.transfer_seconds)
        if len(self.engines) < self.config.roles.engines:
            if now - started > self.config.timeouts.startup_seconds:
                raise RunError(
                    f"{len(self.engines)} of {self.config.roles.engines} engines are up after"
                    f" timeouts.startup_seconds = {self.config.timeouts.startup_seconds}"
                )
            return
        for engine in self.engines.values():
            if now - engine.last_heard > limit:
                raise RunError(f"{engine.name} has been silent for {limit:.0f} s")

    def _handle(self, sender: str, message: m.Message) -> None:
        if sender in self.engines:
            self.engines[sender].last_heard = time.monotonic()
        handler = getattr(self, f"_on_{type(message).__name__}", None)
        if handler is None:
            raise RunError(f"{sender} sent {type(message).__name__}, which is not for here")
        handler(sender, message)
        self._advance()

    def _send(self, to: str, message: m.Message) -> None:
        self._outbox.append((to, message))

    async def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        for to, message in outbox:
            await self.socket.send_multipart([to.encode(), m.encode(message)])

    def _advance(self) -> None:
        """Everything that may have become possible: updates, dispatch, the trainer's batch."""
        for engine in self.engines.values():
            update = engine.next_update()
            if update is not None:
                self._send(engine.name, m.UpdateWeights(manifest=update))
        self._dispatch()
        self._answer_batch()

    # ------------------------------------------------------------ peers

    def _on_Hello(self, sender: str, hello: m.Hello) -> None:
        if hello.protocol != m.PROTOCOL:
            raise RunError(
                f"{sender} speaks protocol {hello.protocol}, this is {m.PROTOCOL}: install the same"
                " version of megatron_rl on every rank"
            )
        if hello.role == TRAINER:
            self.meter.active_parameters = hello.active_parameters
            return
        engine = Engine(sender, hello.capacity, last_heard=time.monotonic())
        self.engines[sender] = engine
        for version in sorted(self.manifests):
            engine.offer(self.manifests[version], self.evaluation_steps)
        if len(self.engines) == self.config.roles.engines:
            self.meter.start_clock()

    def _on_Failed(self, sender: str, failed: m.Failed) -> None:
        raise RunError(f"{sender}: {failed.error}")

    def _on_GeneratorStats(self, sender: str, stats: m.GeneratorStats) -> None:
        self.meter.generator(sender, stats)

    # ------------------------------------------------------------ weights

    def _on_Published(self, sender: str, published: m.Published) -> None:
        manifest = published.manifest
        self.meter.published(published)
        keep = self.evaluation_steps
        self.manifests = {v: x for v, x in self.manifests.items() if v in keep}
        self.manifests[manifest.version] = manifest
        if manifest.version in self.evaluation_steps:
            self.evaluations[manifest.version] = EvaluationRun(
                manifest.version,
                len(self.prompts.heldout),
                self.config.evaluation.samples_per_prompt,
                self.meter.compute(),
            )
        for engine in self.engines.values():
            engine.offer(manifest, keep)

    def _on_WeightsUpdated(self, sender: str, updated: m.WeightsUpdated) -> None:
        engine = self.engines[sender]
        if engine.updating is None or engine.updating.version != updated.version:
            raise RunError(f"{sender} acknowledged version {updated.version}, which was not sent")
        engine.updating, engine.version = None, updated.version
        self.meter.updated(updated)
        if updated.version in self.evaluations:
            self._start_evaluation(engine, updated.version)

    def _oldest_needed(self) -> int:
        needed = [e.oldest_needed for e in self.engines.values()]
        if len(self.engines) < self.config.roles.engines:
            needed.extend(self.manifests)
        return min((v for v in needed if v is not None), default=max(self.manifests, default=0))

    # ------------------------------------------------------------ generation

    def _dispatch(self) -> None:
        s, g = self.config.schedule, self.config.generation
        while True:
            self.groups.skip_finished()
            step = self.groups.next_step
            if step >= s.steps or self.trainer_done is not None:
                return
            free = [
                e
                for e in self.engines.values()
                if e.version != NO_VERSION
                and s.oldest_version(step) <= e.version
                and e.in_flight < e.capacity
            ]
            if not free:
                return
            engine = min(free, key=lambda e: e.in_flight)
            size = s.completions_per_prompt
            group = self.groups.dispatch(size, engine.name, self.curriculum.next)
            engine.in_flight += size
            self._send(
                engine.name,
                m.Generate(
                    group=group.index,
                    prompt_id=group.prompt_id,
                    prompt=self.prompts.train[group.prompt_id].token_ids,
                    thinking_budgets=thinking_budgets(
                        self.config.seed, group.index, size, g.thinking_budget_tokens
                    ),
                    answer_budget=g.answer_budget_tokens,
                    temperature=g.temperature,
                ),
            )

    def _on_Sample(self, sender: str, sample: m.Sample) -> None:
        engine = self.engines[sender]
        engine.in_flight -= 1
        if sample.evaluation >= 0:
            self._evaluated(engine, sample)
            return
        group = self.groups[sample.group]
        group.samples[sample.index] = sample
        group.verdicts[sample.index] = self.verify(self.prompts.train[group.prompt_id], sample)
        self.groups.arrived(group)

    # ------------------------------------------------------------ training

    def _on_BatchRequest(self, sender: str, request: m.BatchRequest) -> None:
        self.requested_step = request.step

    def _answer_batch(self) -> None:
        step, s = self.requested_step, self.config.schedule
        if step is None:
            return
        if step >= s.steps:
            self.requested_step = None
            self._send(TRAINER, m.Batch.stopping(step, versions_needed_from=self._oldest_needed()))
            return
        ready = self.groups.next_groups()
        if ready is None or self.groups.next_groups(s.phase_steps(step)) is None:
            self._check_refill(step)
            return
        self.requested_step = None
        every = self.config.observe.logprob_check_every_steps
        built = build_batch(
            step,
            ready,
            self._prompt_ids,
            self.config.algorithm,
            probe=PROBE_SEQUENCES if self._can_probe and step % every == 0 else 0,
            save=step % self.config.checkpoint.every_steps == 0 and step > self.first_step,
            versions_needed_from=self._oldest_needed(),
        )
        lag = built.metrics["lag_max"]
        if lag > s.max_lag_steps:
            raise RunError(
                f"step {step}: a token is {lag} steps old, schedule.max_lag_steps is"
                f" {s.max_lag_steps}"
            )
        self.probed[step] = built.probe
        self.groups.take(step, ready)
        drawn = {"prompts_excluded": self.curriculum.excluded, "epoch": self.curriculum.epoch}
        if self.config.algorithm.refill:
            drawn["prompts_refilled"] = len(ready) - s.prompts_per_step
        self.meter.batch(step, built.metrics | drawn)
        self._send(TRAINER, built.batch)

    def _check_refill(self, step: int) -> None:
        a, s = self.config.algorithm, self.config.schedule
        drawn = self.groups.complete_ahead()
        if drawn > a.refill_max_ratio * s.prompts_per_step * s.phase_steps(step):
            raise RunError(
                f"step {step}: {drawn} prompts were drawn, and the completions of nearly all have"
                f" one reward; that is more than algorithm.refill_max_ratio ="
                f" {a.refill_max_ratio:g} times schedule.prompts_per_step = {s.prompts_per_step}:"
                " the prompts are too easy or too hard for the policy; take others, or set"
                " algorithm.refill false"
            )

    @property
    def _can_probe(self) -> bool:
        # Engines score given tokens from the plain logits only.
        return self.config.generation.temperature == 1.0

    def _on_StepDone(self, sender: str, done: m.StepDone) -> None:
        for group in self.groups.consume(done.step):
            self.curriculum.record(group.prompt_id, group.pass_rate)
        self.meter.step(done)
        self._score_probe(done, self.probed.pop(done.step))

    def _score_probe(self, done: m.StepDone, probed: list[tuple[list[int], m.Sample]]) -> None:
        """Ask an engine that holds the weights of this step for the same tokens' log-probs."""
        holders = [
            e.name for e in self.engines.values() if e.version == done.step and not e.updating
        ]
        if not (probed and holders):
            return
        self.probe_logprobs[done.step] = done.probe_logprobs
        request = m.ScoreRequest(
            step=done.step,
            prompts=[prompt for prompt, _ in probed],
            completions=[sample.token_ids for _, sample in probed],
        )
        self._send(holders[0], request)

    def _on_Scores(self, sender: str, scores: m.Scores) -> None:
        trainer = self.probe_logprobs.pop(scores.step)
        if scores.version == scores.step:
            self.meter.probe(trainer, scores.logprobs)

    # ------------------------------------------------------------ evaluation

    def _start_evaluation(self, engine: Engine, step: int) -> None:
        """Pin the engine to this version and give it its share of the held-out prompts."""
        g, names = self.config.generation, sorted(self.engines)
        share = self.prompts.heldout[names.index(engine.name) :: len(names)]
        n = self.config.evaluation.samples_per_prompt
        engine.pinned, engine.evaluations_left = True, len(share) * n
        engine.in_flight += len(share) * n
        run = self.evaluations[step]
        run.started = run.started or time.monotonic()
        self.meter.evaluation_started(engine.name)
        for prompt in share:
            budgets = [g.thinking_budget_tokens[1]] * n
            self._send(
                engine.name,
                m.Generate(
                    group=prompt.id,
                    prompt_id=prompt.id,
                    prompt=prompt.token_ids,
                    thinking_budgets=budgets,
                    answer_budget=g.answer_budget_tokens,
                    temperature=g.temperature,
                    evaluation=step,
                ),
            )

    def _evaluated(self, engine: Engine, sample: m.Sample) -> None:
        run = self.evaluations[sample.evaluation]
        prompt = self.prompts.heldout[sample.prompt_id]
        run.add(prompt.id, sample, self.verify(prompt, sample).passed)
        engine.evaluations_left -= 1
        if engine.evaluations_left == 0:
            engine.pinned = False
            self.meter.evaluation_ended(engine.name)
        if run.complete:
            del self.evaluations[run.step]
            self.evaluation_steps.discard(run.step)
            started = run.started or time.monotonic()
            self.meter.evaluation(run.row(time.monotonic() - started))

    # ------------------------------------------------------------ state

    def _on_SaveState(self, sender: str, request: m.SaveState) -> None:
        state = State(
            step=request.step,
            fingerprint=self.prompts.fingerprint,
            prompts_per_step=self.config.schedule.prompts_per_step,
            next_group=self.groups.next_index,
            consumed=self.groups.consumed,
            groups=[
                SavedGroup(
                    index=g.index,
                    prompt_id=g.prompt_id,
                    size=g.size,
                    samples=g.ordered if g.complete else [],
                )
                for g in self.groups.waiting
            ],
            curriculum=self.curriculum.state(),
            compute=self.meter.counters(),
            wall_seconds=self.meter.wall_seconds(),
            aborted=self.meter.aborted,
        )
        save_state(state, Path(request.directory))
        self._send(TRAINER, m.StateSaved(step=request.step))

    def _restore(self, state: State) -> None:
        """Finished groups are kept; the others are generated again, under their old numbers."""
        self.first_step = state.step
        self.curriculum.restore(state.curriculum)
        self.meter.restore(state.compute, state.wall_seconds, state.aborted)
        groups = [Group(g.index, g.prompt_id, g.size, engine="") for g in state.groups]
        for group, saved in zip(groups, state.groups, strict=True):
            prompt = self.prompts.train[group.prompt_id]
            group.samples = {s.index: s for s in saved.samples}
            group.verdicts = {s.index: self.verify(prompt, s) for s in saved.samples}
        self.groups.restore(state.step, state.consumed, groups)

    def _on_TrainerDone(self, sender: str, done: m.TrainerDone) -> None:
        self.trainer_done = done
