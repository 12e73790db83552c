"""Evaluations of a run: their steps, their requests to generators, and their rows."""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from megatron_rl import messages as m
from megatron_rl.config import Evaluation, RunConfig
from megatron_rl.data import PromptSet
from megatron_rl.metrics.metrics_file import Row
from megatron_rl.orchestrator import RunError
from megatron_rl.orchestrator.child_process import EvaluateOnly
from megatron_rl.orchestrator.generators import Generators, GeneratorState
from megatron_rl.orchestrator.run_metrics import RunMetrics
from megatron_rl.orchestrator.steps import row_of
from megatron_rl.rewards import Verdict

HELDOUT = ""  # evaluation of the held-out prompts; the others have the names of their sets
HOLDERS = 2  # generators that are held at a version until its evaluations have every completion


def evaluation_steps(evaluation: Evaluation, steps: int) -> list[int]:
    """Return the steps to evaluate at: 0, then evenly spaced in log compute up to the last step.

    Compute is proportional to steps here. With `every_steps` they are evenly spaced in steps.
    """
    if evaluation.every_steps is not None:
        return _every(evaluation.every_steps, steps)
    spaced = np.geomspace(evaluation.first_step, steps, evaluation.points)
    return sorted({0, *(round(float(s)) for s in spaced), steps})


def _every(interval: int, steps: int) -> list[int]:
    return sorted({*range(0, steps, interval), steps})


def evaluations_in(rows: Iterable[Row]) -> set[tuple[str, int]]:
    """Return the evaluations in metrics.jsonl as (name, step)."""
    evaluated = [r for r in rows if r["kind"] in ("eval", "sets")]
    return {(name, r["step"]) for r in evaluated for name in r.get("sets", [HELDOUT])}


def steps_left(planned: Sequence[int], evaluated: set[int], first_step: int) -> set[int]:
    """Return the steps to evaluate at in a run that starts at `first_step`.

    An evaluation that was running when the run ended cannot be completed: its weights are gone. The
    curve gets a point at the first step instead, unless it has a later one than that: of an earlier
    start that had lost it, or the last of a finished run that is extended, whose new plan has
    points that the old one did not have.

    Example: of 0, 8, 20 with 0 evaluated, a run that starts at step 10 evaluates at 10 and 20.
    """
    missing = set(planned) - evaluated
    left = {s for s in missing if s >= first_step}
    lost = max(missing - left, default=first_step)
    replaced = any(lost < step <= first_step for step in evaluated)
    return left if lost == first_step or replaced else left | {first_step}


EvaluatedSample = tuple[m.Sample, Verdict]  # as JSON a line of `EvaluateOnly.samples_file`


@dataclass(slots=True)
class EvaluationRun:
    """A running evaluation: mean@n over the held-out prompts, or a set's, at one weight version."""

    step: int
    tasks: dict[int, str]  # prompt id -> task
    samples_per_prompt: int
    compute: dict[str, float]  # spent up to this version
    name: str = HELDOUT
    # By (prompt, index): completion and verdict; sum of -log p over the sampled tokens [nats], and
    # their number; times that its tools, environment or agent failed; not made again after those.
    samples: dict[tuple[int, int], EvaluatedSample] = field(default_factory=dict)
    surprisals: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    failures: Counter[tuple[int, int]] = field(default_factory=Counter)
    dropped: set[tuple[int, int]] = field(default_factory=set)
    started: float | None = None
    rows: list[Row] = field(default_factory=list)  # of its rollout file

    def check_versions(self, sample: m.Sample) -> None:
        """Raise ValueError if another weight version sampled a part of a completion."""
        if (versions := {span.version for span in sample.spans}) - {self.step}:
            raise ValueError(
                f"evaluation at step {self.step}: prompt {sample.prompt_id} was answered by weight"
                f" versions {sorted(versions)}; the generators must hold version {self.step} while"
                " it runs"
            )

    def add(self, sample: m.Sample, verdict: Verdict) -> None:
        """Add a verified completion."""
        key = sample.prompt_id, sample.index
        logprobs = m.floats(sample.logprobs)[sample.sampled()]
        self.surprisals[key] = -float(logprobs.sum(dtype=np.float64)), len(logprobs)
        self.samples[key] = msgspec.structs.replace(sample, logprobs=b"", routes=[]), verdict

    @property
    def complete(self) -> bool:
        """True once every completion is verified or dropped."""
        wanted = len(self.tasks) * self.samples_per_prompt
        return len(self.samples) + len(self.dropped) == wanted

    def row(self, seconds: float) -> Row:
        """Return the row of metrics.jsonl: pass rates with standard errors, and compute."""
        rates = self._pass_rates(list(self.tasks))
        row = {"step": self.step, **self.compute, "eval_seconds": seconds}
        if self.name:
            return row | {"sets": {self.name: rates}}
        if len(names := dict.fromkeys(self.tasks.values())) > 1:
            rates["tasks"] = {
                name: self._pass_rates([p for p, task in self.tasks.items() if task == name])
                for name in names
            }
        return row | rates

    def _pass_rates(self, prompts: Sequence[int]) -> dict[str, Any]:
        n = self.samples_per_prompt
        wanted = [(p, i) for p in prompts for i in range(n)]
        keys = [key for key in wanted if key in self.samples]
        samples = [self.samples[key] for key in keys]
        passed = [self.samples[k][1].passed if k in self.samples else np.nan for k in wanted]
        table = np.array(passed, dtype=float).reshape(-1, n)
        table = table[~np.isnan(table).all(axis=1)]
        if not len(table):
            raise RunError(
                f"evaluation at step {self.step}: every rollout was dropped, as its tools, its"
                " environment or its agent failed; the log has the causes"
            )
        truncated = [s.finish_reason == "length" for s, _ in samples]
        nats, tokens = np.sum([self.surprisals[key] for key in keys], axis=0)
        return {
            "pass_rate": float(np.nanmean(table, axis=1).mean()), "num_prompts": len(table),
            "pass_rate_stderr": sampling_stderr(table), "samples_per_prompt": n,
            "pass_at_n": float(np.nanmax(table, axis=1).mean()),
            **({"completions_dropped": len(wanted) - len(keys)} if len(keys) < len(wanted) else {}),
            "verdicts": dict(sorted(Counter(v.outcome.value for _, v in samples).items())),
            "eval_completion_tokens_mean": float(np.mean([s.own_tokens for s, _ in samples])),
            "eval_truncated_fraction": float(np.mean(truncated)),
            "eval_entropy": float(nats / tokens),
        }  # fmt: skip


def sampling_stderr(table: np.ndarray) -> float:
    """Return the standard error of mean@n from sampling, for a fixed set of prompts.

    All evaluations have the same held-out prompts, so the scatter between points of one curve comes
    from the completions: `sqrt(sum_p var_p / n) / P`, [P prompts, n samples]; NaN is a sample that
    is missing, of which a prompt has fewer.
    """
    prompts, samples = table.shape
    if samples < 2:
        return float(table.mean(axis=1).std(ddof=1) / np.sqrt(prompts)) if prompts > 1 else 0.0
    counts = (~np.isnan(table)).sum(axis=1)
    # A prompt with one sample has the variance of a fair coin.
    variance = np.where(counts > 1, np.nanvar(table, axis=1) / np.maximum(counts - 1, 1), 0.25)
    # Without any scatter the error is still not zero: assume half a completion.
    return float(max(np.sqrt(variance.sum()) / prompts, 0.5 / (prompts * samples)))


class Evaluations:
    """The evaluations of a run that starts at `first_step`: those to come and those in progress.

    A share of the generators (`evaluation.engine_share`) evaluates a version: those that load it
    first are held at it and get prompts as they return others. `HOLDERS` of them stay until the
    last completion has arrived, so that one can take what the other loses.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSet,
        metrics: RunMetrics,
        first_step: int,
        only: EvaluateOnly | None = None,
    ) -> None:
        self._config, self._metrics, self._only = config, metrics, only
        evaluation, steps = config.evaluation, config.schedule.steps
        self.prompts = prompts.evaluated  # all prompts by id
        self._parts = {HELDOUT: prompts.heldout, **prompts.sets}
        self._names = [name for name, part in self._parts.items() for _ in part]
        self._samples = {HELDOUT: evaluation.samples_per_prompt}
        planned = {HELDOUT: [0] if only else evaluation_steps(evaluation, steps)}
        for name in prompts.sets:
            self._samples[name] = evaluation.sets[name].samples_per_prompt
            planned[name] = _every(evaluation.sets[name].every_steps, steps)
        self._due, done = set[tuple[str, int]](), evaluations_in(metrics.rows)
        for name, due in planned.items():
            left = steps_left(due, {step for n, step in done if n == name}, first_step)
            self._due |= {(name, step) for step in left}
        self.running: dict[tuple[str, int], EvaluationRun] = {}  # by name and step, until complete
        # version -> (prompt, completions) that no generator has
        self._todo: dict[int, deque[tuple[int, list[int]]]] = {}

    @property
    def steps(self) -> set[int]:
        """Steps to evaluate at."""
        return {step for _, step in self._due}

    def reach(self, version: int) -> None:
        """Open the evaluations of a version that are planned, when its steps are trained."""
        for name in self._parts:
            if (name, version) in self._due:
                self._open(name, version)

    def _open(self, name: str, version: int) -> None:
        part, n, compute = self._parts[name], self._samples[name], self._metrics.compute()
        tasks = {p.id: p.task for p in part}
        self.running[name, version] = EvaluationRun(version, tasks, n, compute, name)
        todo = self._todo.setdefault(version, deque())
        todo.extend((p.id, list(range(n))) for p in part)

    def wanted(self, generators: Generators) -> set[int]:
        """Return the versions that more generators have to load; none of them skips one."""
        held = Counter(g.evaluating for g in generators)
        to_come = generators.size - len(generators.ready)

        def wants(version: int) -> bool:
            others = sum(g.version <= version and g.evaluating != version for g in generators.ready)
            limit = min(self._engines(generators), held[version] + others + to_come)
            return not held[version] or held[version] < limit

        return {v for v in self.steps if self._todo.get(v, True) and wants(v)}

    def _engines(self, generators: Generators) -> int:
        return max(1, math.ceil(self._config.evaluation.engine_share * generators.size))

    def requests(self, generators: Generators) -> Iterator[tuple[GeneratorState, m.Generate]]:
        """Yield what generators that hold a version under evaluation get now."""
        engines = self._engines(generators)
        for version, todo in list(self._todo.items()):
            holders = [g for g in generators if g.evaluating == version]
            free = [g for g in generators if g.takes_work and g.evaluating is None]
            for g in free if todo else ():
                if g.reads(version) and len(holders) < engines:
                    g.evaluating = version
                    holders.append(g)
            tasks = sum(len(r.tasks) for (_, step), r in self.running.items() if step == version)
            share = -(-tasks // engines)
            for g in holders if todo else ():
                while todo and g.takes_work and sum(key[0] == version for key in g.work) < share:
                    yield g, self._request(version, *todo.popleft())
            self._release(version, holders, bool(todo))
            if not todo and not holders:
                del self._todo[version]

    def _request(self, version: int, prompt_id: int, indices: list[int]) -> m.Generate:
        g, prompt = self._config.generation, self.prompts[prompt_id]
        longest = g.thinking_budget_tokens[1], g.answer_budget_tokens
        run = self.running[self._names[prompt_id], version]
        if run.started is None:
            run.started = time.monotonic()
            self._metrics.sink.note("evaluating")
        return m.Generate(
            group=prompt_id, prompt_id=prompt_id, prompt=prompt.token_ids, indices=indices,
            limits=[m.TurnLimits(*longest)] * len(indices), evaluation=version, task=prompt.task,
            row=row_of(self._config, prompt),
            temperature=self._only.temperature if self._only else g.temperature,
        )  # fmt: skip

    def _release(self, version: int, holders: list[GeneratorState], has_more: bool) -> None:
        """Let holders load newer versions that are not needed for this one any more."""
        left = [any(key[0] == version for key in g.work) for g in holders]
        over = not has_more and not any(left)
        for g, busy in list(zip(holders, left, strict=True)):
            if over or (not busy and not has_more and len(holders) > HOLDERS):
                g.evaluating = None
                holders.remove(g)

    def lost(self, version: int, prompt_id: int, indices: set[int]) -> None:
        """Put completions of a lost generator back."""
        if (self._names[prompt_id], version) in self.running:
            self._todo[version].appendleft((prompt_id, sorted(indices)))

    def move(self, generators: Generators, readable_from: int, newest: int) -> None:
        """Restart evaluations at the newest version whose weights are gone."""
        for version in [v for v, todo in self._todo.items() if todo]:
            held = any(version in (g.evaluating, g.version, g.updating) for g in generators)
            if held or version >= readable_from or newest <= version:
                continue
            for name in [name for name, step in self.running if step == version]:
                del self.running[name, version]
                self._due.discard((name, version))
                if (name, newest) not in self._due:  # else its own evaluation is running
                    self._due.add((name, newest))
                    self._open(name, newest)
            del self._todo[version]
            self._metrics.sink.note(
                f"evaluation at step {version}: every generator that had its weights was lost; it"
                f" is made at step {newest}"
            )

    def rollout_failed(self, failed: m.RolloutFailed, attempts: int) -> bool:
        """Have a rollout made again; True: dropped, as its last attempt.

        Raises:
            RunError: it was dropped, and `megatron-rl evaluate` needs all completions.
        """
        if (run := self._run_of(failed)) is None:
            return False
        key = failed.prompt_id, failed.index
        run.failures[key] += 1
        if run.failures[key] < attempts:
            self.lost(failed.evaluation, failed.prompt_id, {failed.index})
            return False
        if self._only:
            raise RunError(
                f"completion {failed.index} of prompt {failed.prompt_id} failed"
                f" {attempts} times (rollout.attempts): {failed.cause}: {failed.reason}"
            )
        run.dropped.add(key)
        self._end(run)
        return True

    def arrived(self, sample: m.Sample) -> None:
        """Count a completion."""
        if (run := self._run_of(sample)) is not None:
            run.check_versions(sample)
        self._metrics.spend_tokens(0, sample.own_tokens)

    def verified(self, sample: m.Sample, verdict: Verdict) -> None:
        """Add a verdict; the last one of an evaluation writes its row."""
        if (run := self._run_of(sample)) is None:
            return
        run.add(sample, verdict)
        if self._only:
            with open(self._only.samples_file, "ab") as file:
                file.write(msgspec.json.encode(run.samples[sample.prompt_id, sample.index]) + b"\n")
        recorder, prompt = self._metrics.recorder, self.prompts[sample.prompt_id]
        recorder.evaluated(run.rows, run.name, prompt, sample, verdict)
        self._end(run)

    def _end(self, run: EvaluationRun) -> None:
        if not run.complete:
            return
        del self.running[run.name, run.step]
        self._due.discard((run.name, run.step))
        now = time.monotonic()
        row = run.row(now - (run.started or now))
        self._metrics.sink.write("sets" if run.name else "eval", row)
        self._metrics.recorder.write("eval", run.step, run.rows)

    def _run_of(self, answer: m.Sample | m.RolloutFailed) -> EvaluationRun | None:
        """Return the evaluation of a rollout; None if it was moved to another version."""
        return self.running.get((self._names[answer.prompt_id], answer.evaluation))
