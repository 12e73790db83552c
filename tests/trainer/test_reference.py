"""Frozen policies: the old one of a phase, the reference, and the gradient of the entropy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.models import architecture, tiny
from megatron_rl.models.packing import RowLayout
from megatron_rl.trainer.batch import MicroBatch, divide
from megatron_rl.trainer.loss import vocabulary_parallel_logprobs
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.reference import (
    FOLDER,
    FixedPolicies,
    FrozenWeights,
    newest_before,
    old_is_current,
)
from megatron_rl.trainer.step import Trainer
from tests.trainer.cases import batch, run_config, world_of_one, write_model
from tests.trainer.test_logprobs import GROUP

PHASES = {
    "schedule__mode": "ppo_off_policy",
    "schedule__updates_per_phase": 3,
    "schedule__max_lag_steps": 2,
    "algorithm__loss": {"kind": "ppo_clip"},
    "algorithm__old_policy": "trainer",
}
KL = {"algorithm__kl_coefficient": 0.1}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "hf", "tiny_dense")


@pytest.fixture(scope="module")
def world(directory: Path) -> Iterator[None]:
    with world_of_one(run_config(directory)):
        yield


def micro_batches(step: int) -> list[MicroBatch]:
    return divide(batch(step), architecture(tiny.CONFIGS["tiny_dense"]), RowLayout(max_tokens=40))


def joined(micros: list[MicroBatch], name: str) -> torch.Tensor:
    return torch.cat([getattr(micro, name) for micro in micros])


def logprobs(policy: Policy, step: int) -> torch.Tensor:
    """Under the weights that the policy has now."""
    micros = micro_batches(step)
    FrozenWeights(policy).logprobs(micros)
    return joined(micros, "logprobs_T")


def test_frozen_weights_stay_and_the_policys_are_left_alone(world: None, directory: Path) -> None:
    policy = Policy(run_config(directory), directory)
    frozen, start = FrozenWeights(policy), logprobs(policy, 0)
    Trainer(run_config(directory), policy).train_step(batch(0), 0)
    trained = {name: p.data.clone() for name, p in policy.parameters.items()}
    micros = micro_batches(0)
    frozen.logprobs(micros)
    torch.testing.assert_close(joined(micros, "logprobs_T"), start, atol=0, rtol=0)
    assert all(torch.equal(p.data, trained[n]) for n, p in policy.parameters.items())
    assert (logprobs(policy, 0) - start).abs().max() > 1e-4


def test_the_old_policy_is_the_phases_first_until_the_next_begins(
    world: None, directory: Path, tmp_path: Path
) -> None:
    config = run_config(directory, output_dir=tmp_path, **PHASES)
    policy = Policy(config, directory)
    trainer, at_start = Trainer(config, policy), {}
    for step in range(5):
        phase = step - step % 3
        if step == phase:
            at_start[phase] = FrozenWeights(policy)
        assert old_is_current(config, step) == (step == phase)
        trainer.train_step(batch(step), step)
        if step != phase:
            micros, want = micro_batches(step), micro_batches(step)
            trainer._fixed.add_logprobs(micros, step)
            at_start[phase].logprobs(want)
            torch.testing.assert_close(
                joined(micros, "old_logprobs_T"), joined(want, "logprobs_T"), atol=0, rtol=0
            )


def test_the_clip_bites_within_a_phase_and_not_at_its_start(world: None, directory: Path) -> None:
    config = run_config(directory, optimizer__learning_rate=0.02, **PHASES)
    policy = Policy(config, directory)
    trainer = Trainer(config, policy)
    clipped = [trainer.train_step(batch(0), step).metrics["clipped_fraction"] for step in range(4)]
    assert clipped[0] == clipped[3] == 0.0
    assert min(clipped[1:3]) > 0.0


def test_a_run_resumed_within_a_phase_takes_the_generators_logprobs(
    world: None, directory: Path
) -> None:
    config = run_config(directory, **PHASES)
    micros = micro_batches(4)
    FixedPolicies(config, Policy(config, directory)).add_logprobs(micros, 4)
    assert all(micro.old_logprobs_T is None for micro in micros)
    assert not old_is_current(config, 4)
    assert old_is_current(config, 6)


def test_nothing_is_frozen_where_nothing_is_asked_for(world: None, directory: Path) -> None:
    config = run_config(directory)
    fixed, micros = FixedPolicies(config, Policy(config, directory)), micro_batches(0)
    fixed.add_logprobs(micros, 0)
    assert all(m.old_logprobs_T is m.reference_logprobs_T is None for m in micros)
    assert fixed._old is fixed._reference is None


def test_the_reference_is_the_start_checkpoint_after_a_resume_too(
    world: None, directory: Path, tmp_path: Path
) -> None:
    config = run_config(directory, output_dir=tmp_path, **KL)
    policy = Policy(config, directory)
    start = logprobs(policy, 0)
    trainer = Trainer(config, policy)
    first = trainer.train_step(batch(0), 0).metrics
    second = trainer.train_step(batch(0), 1).metrics
    assert first["kl_reference"] == pytest.approx(0.0, abs=1e-7)
    assert second["kl_reference"] > 1e-6
    micros = micro_batches(0)
    FixedPolicies(config, policy).add_logprobs(micros, 2)
    reference = joined(micros, "reference_logprobs_T")
    torch.testing.assert_close(reference, start, atol=0, rtol=0)


def test_the_kl_term_pulls_back_to_the_reference(world: None, directory: Path) -> None:
    found = []
    for coefficient in (0.0, 5.0):
        config = run_config(directory, algorithm__kl_coefficient=coefficient)
        policy = Policy(config, directory)
        trainer, start = Trainer(config, policy), logprobs(policy, 0)
        for step in range(4):
            trainer.train_step(batch(0), step)
        found.append(float((logprobs(policy, 0) - start).abs().mean()))
    assert found[1] < 0.8 * found[0]


def test_a_reset_reference_is_kept_for_a_resumed_run(
    world: None, directory: Path, tmp_path: Path
) -> None:
    config = run_config(directory, output_dir=tmp_path, **KL, algorithm__kl_reset_steps=2)
    policy = Policy(config, directory)
    trainer, at = Trainer(config, policy), {}
    for step in range(4):
        at[step] = logprobs(policy, 0)
        trainer.train_step(batch(0), step)
    folder = tmp_path / FOLDER
    assert newest_before(folder, 1) is None
    assert newest_before(folder, 3) == folder / "step_000002"
    micros = micro_batches(0)
    FixedPolicies(config, policy).add_logprobs(micros, 3)
    reference = joined(micros, "reference_logprobs_T")
    torch.testing.assert_close(reference, at[2], atol=1e-6, rtol=1e-6)
    # A new run in the same folder begins with the start checkpoint.
    FixedPolicies(config, policy).add_logprobs(micros, 0)
    reference = joined(micros, "reference_logprobs_T")
    torch.testing.assert_close(reference, at[0], atol=0, rtol=0)
    assert not folder.exists()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_entropys_gradient_equals_float64(temperature: float) -> None:
    rng = torch.Generator().manual_seed(1)
    base = torch.randn(9, 40, generator=rng) * 4
    base[0, :37] = torch.tensor([200.0] + [0.0] * 36)  # all mass on one token
    targets = torch.randint(0, 37, (9,), generator=rng)
    logits = base.clone().requires_grad_()
    logprobs_T, entropy_T = vocabulary_parallel_logprobs(
        logits, targets, temperature, 37, GROUP, True
    )
    exact = base[:, :37].double().requires_grad_()
    all_T = torch.log_softmax(exact / temperature, -1)
    want_T = -(all_T.exp() * all_T).sum(-1)
    torch.testing.assert_close(entropy_T.double(), want_T, atol=2e-5, rtol=1e-6)
    weights = torch.randn(9, generator=rng)
    (0.3 * logprobs_T * weights + entropy_T * weights).sum().backward()
    picked_T = all_T.gather(1, targets[:, None])[:, 0]
    (0.3 * picked_T * weights + want_T * weights).sum().backward()
    torch.testing.assert_close(logits.grad[:, :37].double(), exact.grad, atol=1e-5, rtol=1e-4)
    assert (logits.grad[:, 37:] == 0).all()
