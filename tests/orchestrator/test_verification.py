"""Verdicts that come late, from processes that die: no reward changes and no group is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter

import pytest

from megatron_rl.config import RunConfig, load_config
from megatron_rl.data import Prompt
from megatron_rl.data.question import Question
from megatron_rl.messages import Sample, VersionSpan, float_bytes, floats, int_bytes
from megatron_rl.orchestrator.batching import build_batch
from megatron_rl.orchestrator.groups import Group
from megatron_rl.orchestrator.state import load_state
from megatron_rl.orchestrator.verification import Verification
from megatron_rl.rewards import Outcome, Verdict, VerifierDown, pool
from megatron_rl.rewards.verifier_settings import RewardValues, VerifierSettings
from tests.orchestrator import rewards
from tests.orchestrator.peers import Late, run, small_config, verify
from tests.rewards.conftest import children
from tests.segments import segments

FIRST_EVEN = f"{rewards.PATH}:first_even"
SLOW = f"{rewards.PATH}:slow_first_even"
ENDLESS = f"{rewards.PATH}:sometimes_endless"


class Recorded(Verification):
    """The pool's verdicts, and what each completion should have got."""

    def __init__(self, kind, **settings):
        super().__init__(VerifierSettings(**settings), [kind], rewards.decode)
        self.wrong, self.verified = [], 0

    def start(self, prompt, sample):
        task = super().start(prompt, sample)
        task.add_done_callback(lambda t: self._compare(sample, t))
        return task

    def _compare(self, sample, task):
        if not task.cancelled() and task.exception() is None:
            self.verified += 1
            if task.result().passed != verify(None, sample).passed:
                self.wrong.append((sample, task.result()))


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def working(verification):
    """Return the processes that verify (their parents would replace a dead one)."""
    return [pid for worker in verification.pool.workers for pid in children(worker.pid)]


# ---------------------------------------------------------------- late verdicts


def test_training_keeps_its_order_whatever_is_verified_first():
    config = small_config()
    late = run(config, seed=1, verification=Late(verify, seconds=0.03))
    at_once = run(config, seed=2)
    assert [r["step"] for r in late.rows.steps] == list(range(12))
    for rows in (late.rows, at_once.rows):
        assert [r["step"] for r in rows.evals] == [0, 3, 6, 12]
    prompts = [[r["prompt_ids"] for r in o.rows.steps] for o in (late, at_once)]
    assert prompts[0] == prompts[1]
    assert max(r["lag_max"] for r in late.rows.steps) <= config.schedule.max_lag_steps


def test_a_verifier_that_is_behind_holds_the_generators_back():
    config = small_config(max_lag_steps=8)
    behind = Late(verify, seconds=0.02, limit=8)
    outcome = run(config, verification=behind)
    assert len(outcome.rows.steps) == 12
    # 8 under way stop the dispatch; what was dispatched before comes all the same.
    in_flight = sum(config.roles.engines * [24])
    assert behind.most <= 8 + in_flight
    assert behind.most > 0


def test_a_checkpoint_with_verdicts_under_way_loses_no_group(tmp_path):
    config = small_config(max_lag_steps=4)
    whole = run(config, seed=1)

    class Held(Late):
        """No verdict on what the first five steps don't train."""

        def start(self, prompt, sample):
            self.seconds = 0.01 if sample.evaluation >= 0 or sample.group < 15 else 10**6
            return super().start(prompt, sample)

    held = Held(verify)
    first = run(
        config, seed=2, directory=tmp_path, slowness=0.0005, verification=held,
        save_before=5, stop_before=5,
    )  # fmt: skip
    state = load_state(tmp_path, "fingerprint", 3)
    waiting = [g for g in state.groups if g.samples and len(g.verdicts) < len(g.samples)]
    assert waiting, "no verdict was under way"
    rest = run(config, seed=3, directory=tmp_path, resume=True)
    prompts = [r["prompt_ids"] for r in (*first.rows.steps, *rest.rows.steps)]
    assert prompts == [r["prompt_ids"] for r in whole.rows.steps]


def test_verdicts_of_a_checkpoint_are_not_asked_for_again(tmp_path):
    config = small_config(max_lag_steps=4)
    run(config, directory=tmp_path, save_before=5, stop_before=5)
    saved = [
        (g.index, i) for g in load_state(tmp_path, "fingerprint", 3).groups for i in g.verdicts
    ]
    assert saved
    requested = []

    class Requested(Late):
        def start(self, prompt, sample):
            requested.append((sample.group, sample.index) if sample.evaluation < 0 else None)
            return super().start(prompt, sample)

    run(config, directory=tmp_path, resume=True, verification=Requested(verify))
    assert not set(saved) & set(requested)


# ---------------------------------------------------------------- the pool's processes


def test_killing_verifier_workers_at_random_changes_no_reward_and_loses_no_group():
    config = small_config(steps=30, max_lag_steps=4)
    recorded = Recorded(SLOW, workers=2)
    killed = []

    async def killer(verification):
        rng, at = random.Random(3), 0
        while True:
            # Verdicts between the kills: workers that only die would rightly count as down.
            if verification.verified >= at:
                fork_servers = [worker.pid for worker in verification.pool.workers]
                pids = fork_servers if len(killed) % 10 == 4 else working(verification)
                killed.extend(rng.sample(pids, min(1, len(pids))))
                kill(killed[-1:])
                at = verification.verified + rng.randint(5, 20)
            await asyncio.sleep(rng.uniform(0, 0.01))

    outcome = run(config, seed=1, verification=recorded, concurrent=killer, kind=SLOW)
    undisturbed = run(config, seed=2)
    assert len(killed) >= 10 and recorded.pool.stats.deaths >= 5
    assert recorded.wrong == []
    # 30 steps and what was generated ahead, and 4 evaluations of 6 x 2
    assert recorded.verified >= 30 * 3 * 4 + 4 * 12
    assert [r["step"] for r in outcome.rows.steps] == list(range(30))
    # In the first epoch (40 prompts); which ones the next leaves out hangs on random completions.
    prompts = [[r["prompt_ids"] for r in o.rows.steps[:13]] for o in (outcome, undisturbed)]
    assert prompts[0] == prompts[1]
    assert sum(r["completions_without_reward"] for r in outcome.rows.steps) == 0
    assert all(r["completions"] == 12 for r in outcome.rows.steps)
    assert outcome.rows.steps[-1]["verifier_deaths"] >= 2


def test_killing_all_workers_stops_the_run_with_a_named_error(monkeypatch):
    # Whose processes die before they take a request, that worker is lost after its limit and this.
    monkeypatch.setattr(pool, "GRACE_SECONDS", 1.0)

    async def killer(verification):
        while True:
            kill(working(verification))
            await asyncio.sleep(0)

    down = Recorded(SLOW, workers=2, max_deaths=4, wall_seconds=1.0, cpu_seconds=1.0)
    with pytest.raises(VerifierDown, match="4 verifier workers died in a row"):
        run(small_config(), verification=down, concurrent=killer, kind=SLOW)


def test_a_verifier_that_cannot_start_stops_the_run_before_it_begins():
    missing = Recorded(f"{rewards.PATH}:nowhere", workers=1)
    with pytest.raises(VerifierDown, match="nowhere"):
        run(small_config(), verification=missing, kind=FIRST_EVEN)


def test_a_verdict_that_is_no_reward_leaves_its_completion_out_of_the_batch():
    # Every first token below 8 (4 of 27) takes for ever: timed out, and no reward by default.
    limits = Verification(VerifierSettings(workers=2, cpu_seconds=0.05), [ENDLESS], rewards.decode)
    outcome = run(small_config(steps=4), verification=limits, kind=ENDLESS)
    rows = outcome.rows.steps
    timed_out = sum(r["verdicts"].get("timed_out", 0) for r in rows)
    assert timed_out > 0
    assert timed_out == sum(r["completions_without_reward"] for r in rows)
    # The rewards that there are, are +1 and -1: their mean follows from the verdicts.
    for row in rows:
        right, wrong = row["verdicts"].get("correct", 0), row["verdicts"].get("wrong", 0)
        assert row["reward_mean"] == pytest.approx((right - wrong) / (right + wrong))


def test_rewards_are_plus_and_minus_one_from_the_math_verifier_to_the_batch():
    # Half of a group is right, the other half has no box, no end of thinking, or a box that is no
    # answer: the paper trains the prompt with rewards +1 and -1.
    config = load_config(None, ["--recipe", "scalerl"])
    right, unboxed, unended = "</think>\\boxed{4}", "</think>It is 4.", "\\boxed{4}"
    texts = [right] * 8 + [unboxed] * 4 + [unended, unended, "</think>\\boxed{2 3}", "</think>"]
    prompt = Prompt(0, "2+2", [1, 2], Question("", "math", "", "4"))
    group = Group(0, 0, len(texts), values=config.verifier.values)
    for i in range(len(texts)):
        group.samples[i] = Sample(
            group=0,
            index=i,
            prompt_id=0,
            evaluation=-1,
            token_ids=int_bytes([i]),
            logprobs=float_bytes([-0.5]),
            segments=segments(1),
            spans=[VersionSpan(0, 0, 1)],
            finish_reason="stop",
        )

    async def verified():
        verification = Verification(config.verifier, ["math"], lambda ids: texts[ids[0]])
        async with verification:
            return [await verification.start(prompt, s) for s in group.ordered]

    group.verdicts.update(enumerate(asyncio.run(verified())))
    outcomes = Counter(v.outcome.value for v in group.verdicts.values())
    assert outcomes == {"correct": 8, "no_answer": 7, "unparsable": 1}
    assert group.pass_rate == 0.5
    built = build_batch(0, [group], {0: prompt.token_ids}, config.algorithm)
    assert built.kept == [group]
    advantages = floats(built.batch.advantages)[2::3].tolist()
    assert advantages == pytest.approx([1] * 8 + [-1] * 8, abs=1e-5)
    assert built.metrics["reward_mean"] == 0.0
    assert built.metrics["completions_without_reward"] == 0


def test_cheap_verdicts_are_made_at_once_and_need_no_process():
    verification = Verification(
        VerifierSettings(), ["exact"], lambda ids: "</think>\\boxed{5}<eos>"
    )
    assert verification.pool is None and not verification.full

    class Sample:
        verdict, last_turn = None, int_bytes([1])

    prompt = Prompt(0, "2+3", [1], Question("", "exact", "", "5"))
    verdict = verification.start(prompt, Sample)
    assert isinstance(verdict, Verdict) and verdict.outcome is Outcome.CORRECT


def test_the_values_of_verdicts_are_the_configurations():
    config = RunConfig(verifier={"values": {"no_answer": None, "wrong": 0.0}})
    values = config.verifier.values
    assert [values.of(Verdict(o, "")) for o in Outcome] == [1.0, 0.0, None, -1.0, None]
    assert RewardValues().of(Verdict(Outcome.NO_ANSWER, "")) == -1.0
    assert values.of(Verdict(Outcome.WRONG, "", reward=0.25)) == 0.25
