"""The plug-in's pieces: arguments beside the configuration, and the own loop's loss and gradient.

What `megatron.training.pretrain` does with them is in tests/e2e/test_pretraining.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.megatron_plugin import arguments, join
from megatron_rl.megatron_plugin.data_iterator import PluginSteps
from megatron_rl.megatron_plugin.plugin_model import PluginModel
from megatron_rl.trainer.batch import micro_batches_of
from megatron_rl.trainer.loss import HeadPass, Objective
from megatron_rl.trainer.model import Policy, forward
from megatron_rl.trainer.step import Trainer
from megatron_rl.trainer.step_metrics import report
from tests.trainer.cases import batch, run_config, world_of_one, write_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Matrices of `initializer_range`: larger ones lose more to rounding.
    return write_model(tmp_path_factory.mktemp("model") / "hf", "tiny_dense", scale=0.2)


@pytest.fixture(scope="module")
def world(directory: Path) -> Iterator[None]:
    with world_of_one(run_config(directory)):
        yield


def script_model(policy: Policy, **config: Any) -> Any:
    """Build the model as a script does: Megatron's own attention, only its arguments."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    for name, value in config.items():
        setattr(policy.config, name, value)
    return GPTModel(
        policy.config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        policy.architecture.vocabulary,
        policy.architecture.positions,
        position_embedding_type="rope",
        rotary_base=1000,
    )


def test_the_loss_and_the_gradient_are_those_of_the_own_loop(world: None, directory: Path) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = run_config(directory)
    policy = Policy(config, directory)
    module = script_model(policy)
    module.load_state_dict(policy.modules[0].state_dict(), strict=False)
    chunk = DistributedDataParallel(
        policy.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module
    )
    seen: dict[str, Any] = {}
    apply = policy.apply

    def observed(learning_rate: float) -> float:
        seen.update({name: p.main_grad.clone() for name, p in policy.parameters.items()})
        return apply(learning_rate)

    policy.apply = observed  # type: ignore[method-assign]
    done = Trainer(config, policy).train_step(batch(), 0)

    config.schedule.packing = False
    plugged = PluginModel(config, [module], use_te=False, micro_batches=3)
    micro_batches, objective = micro_batches_of(batch(), plugged), Objective(config.algorithm)
    assert len(micro_batches) == 3
    chunk.zero_grad_buffer()
    loss = 0.0
    for micro in micro_batches:
        context = HeadPass(config, plugged.architecture.vocabulary, micro, objective)
        summed = forward(chunk, context, stock_attention=True)
        summed.backward()
        loss += float(summed.detach())
    found, _ = report(batch(), micro_batches, objective, plugged)
    assert loss == pytest.approx(done.metrics["loss"], rel=1e-6)
    for name, value in found.items():
        assert value == pytest.approx(done.metrics[name], rel=1e-6, abs=1e-6), name
    for name, reference in seen.items():
        own = plugged.parameters[name].main_grad
        difference = float((own - reference).norm() / reference.norm())
        assert difference < 1e-6, f"{name}: {difference:.1e}"


def test_a_step_with_too_many_micro_batches_names_the_sizes(world: None, directory: Path) -> None:
    config = run_config(directory, schedule__packing=False, schedule__micro_batch_tokens=1)
    policy = Policy(config, directory)
    plugged = PluginModel(config, [script_model(policy)], use_te=False, micro_batches=2)
    with pytest.raises(ConfigError, match="--global-batch-size"):
        plugged.check_count(len(micro_batches_of(batch(), plugged)), 0)


def test_a_model_of_other_sizes_is_refused_by_field(world: None, directory: Path) -> None:
    config = run_config(directory)
    module = script_model(Policy(config, directory), layernorm_epsilon=1e-3, hidden_dropout=0.1)
    with pytest.raises(ConfigError, match=r"layernorm_epsilon is 0\.001.*hidden_dropout is 0\.1"):
        PluginModel(config, [module], use_te=False, micro_batches=1)


def test_router_losses_are_means_over_the_tokens_of_a_step_also_of_none(
    world: None, directory: Path
) -> None:
    config = run_config(directory)
    module = script_model(Policy(config, directory), moe_z_loss_coeff=0.5)
    plugged = PluginModel(config, [module], use_te=False, micro_batches=1)
    for tokens, coefficient in ((4, 0.125), (0, 0.5), (2, 0.25)):
        plugged.divide_router_losses(tokens)
        assert module.config.moe_z_loss_coeff == coefficient


def test_the_orchestrators_state_is_saved_beside_megatrons(tmp_path: Path) -> None:
    said = []

    class Client:
        def save_state(self, step: int, directory: str) -> None:
            said.append((step, directory))

    steps = PluginSteps(None, None, Client(), None, 7)  # type: ignore[arg-type]
    assert steps.save_state(tmp_path) == {"step": 7}
    assert said == [(7, str(tmp_path / "iter_0000007" / "megatron_rl"))]
    assert Path(said[0][1]).is_dir()


# ---------------------------------------------------------------- arguments

MEGATRON = SimpleNamespace(
    world_size=2,
    seed=3,
    train_iters=20,
    train_samples=None,
    global_batch_size=16,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
    context_parallel_size=1,
    expert_model_parallel_size=1,
    expert_tensor_parallel_size=None,
    sequence_parallel=True,
    use_distributed_optimizer=False,
    bf16=False,
    lr=1e-4,
    clip_grad=1.0,
    eval_interval=5,
    transformer_impl="local",
)


@pytest.fixture
def own(tmp_path: Path) -> Any:
    file = tmp_path / "rl.yaml"
    file.write_text("model: tiny_dense\nschedule: {prompts_per_step: 4}\n")
    argv = ["--lr", "1e-4", "--rl-config", str(file), "--rl-set", "schedule.max_lag_steps=2"]
    return arguments.peek(argv)


def test_megatrons_arguments_decide_their_keys(own: Any) -> None:
    config = arguments.read(own, arguments.of_megatron(MEGATRON, generator_ranks=1))
    assert (config.roles.trainer_ranks, config.roles.generator_ranks) == (2, 1)
    assert (config.parallel.tensor, config.parallel.sequence_parallel) == (2, True)
    assert (config.schedule.steps, config.schedule.prompts_per_step) == (20, 4)
    assert config.schedule.max_lag_steps == 2
    assert (config.precision.params, config.evaluation.every_steps) == ("fp32", 5)
    assert arguments.megatron_keys_in(own) == []
    arguments.check_config(config)
    arguments.check(MEGATRON, config)


@pytest.mark.parametrize(
    ("change", "steps", "every"),
    [
        ({"train_iters": None, "train_samples": 330}, 20, 5),
        ({"train_iters": 3}, 3, 3),
        ({"eval_interval": None}, 20, 20),
    ],
)
def test_samples_and_the_evaluation_interval_are_those_of_megatron(
    own: Any, change: dict[str, Any], steps: int, every: int
) -> None:
    args = SimpleNamespace(**{**vars(MEGATRON), **change})
    config = arguments.read(own, arguments.of_megatron(args, generator_ranks=1))
    assert (config.schedule.steps, config.evaluation.every_steps) == (steps, every)


def test_a_run_without_a_length_is_refused() -> None:
    args = SimpleNamespace(**{**vars(MEGATRON), "train_iters": None})
    with pytest.raises(ConfigError, match="neither --train-iters nor --train-samples"):
        arguments.of_megatron(args, generator_ranks=1)


def test_a_key_of_megatrons_in_the_file_is_named(own: Any) -> None:
    own.rl_config.write_text("model: tiny_dense\nparallel: {tensor: 2}\n")
    own.rl_set = ["schedule.steps=3"]
    assert arguments.megatron_keys_in(own) == ["schedule.steps", "parallel.tensor"]


def test_what_does_not_go_together_is_refused(own: Any) -> None:
    own.rl_set += ["schedule.packing=true"]
    config = arguments.read(own, arguments.of_megatron(MEGATRON, generator_ranks=1))
    with pytest.raises(ConfigError, match="--transformer-impl local"):
        arguments.check(MEGATRON, config)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (["algorithm.kl_coefficient=0.1"], "algorithm.kl_coefficient is 0.1"),
        (
            [
                "algorithm.loss.kind=ppo_clip",
                "algorithm.old_policy=trainer",
                "schedule.mode=ppo_off_policy",
                "schedule.updates_per_phase=2",
            ],
            "schedule.updates_per_phase = 2",
        ),
    ],
)
def test_keys_that_need_the_own_loop_are_refused_before_anything_starts(
    own: Any, keys: list[str], named: str
) -> None:
    own.rl_set += keys
    argv = ["--rl-config", str(own.rl_config), "--rl-set", *own.rl_set]
    with pytest.raises(ConfigError, match=named):
        join(argv)


def test_a_set_without_a_value_is_refused(own: Any) -> None:
    own.rl_set = ["schedule.max_lag_steps"]
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        arguments.read(own, [])


def test_without_a_configuration_the_script_stays_as_it_is() -> None:
    rl = join(["--lr", "1e-4"])
    pieces = [object(), object(), object()]
    assert not rl.active
    assert [rl.model(pieces[0]), rl.step(pieces[1]), rl.data(pieces[2])] == pieces  # type: ignore[arg-type]
    rl.finish()


def test_ranks_that_do_not_suffice_are_refused(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="roles.generator_ranks is 1"):
        join(["--rl-config", str(own.rl_config)])
