"""The configuration rejects values that cannot run, with the key, the value and the remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rl.algorithm.losses.cispo import Cispo
from megatron_rl.config import (
    ArithmeticTask,
    ConfigError,
    RunConfig,
    Section,
    describe,
    load_config,
    save_config,
)

LEAVES = {key: (kind, default, text) for key, kind, default, text in describe()}


def refused(overrides: list[str], *parts: str) -> None:
    """Check that loading with these overrides raises a ConfigError with all the parts."""
    with pytest.raises(ConfigError) as e:
        load_config(None, overrides)
    for part in parts:
        assert part in str(e.value)


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_defaults_are_a_valid_run() -> None:
    config = load_config(None)
    assert config.roles.world_size == 3
    assert config.schedule.max_lag_steps == 8
    assert config.algorithm.loss == Cispo(max_ratio=5.0)


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "schedule:\n  steps: 50\n  max_lag_steps: 2\nseed: 7\n")
    config = load_config(path, ["--schedule.steps", "40", "--model=tiny_dense"])
    assert (config.schedule.steps, config.schedule.max_lag_steps) == (40, 2)
    assert (config.seed, config.model) == (7, "tiny_dense")
    # Other keys of the section keep their defaults.
    assert config.schedule.prompts_per_step == RunConfig().schedule.prompts_per_step


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        (["--resume"], "resume", True),
        (["--no-resume"], "resume", False),
        (["--metrics.wandb=offline"], "metrics.wandb", "offline"),
        (["--generation.thinking_budget_tokens", "[10, 12]"], None, (10, 12)),
        (["--optimizer.learning_rate", "2e-4"], "optimizer.learning_rate", 2e-4),
        (["--output_dir", "runs/demo"], "output_dir", Path("runs/demo")),
        (["--kernels.chunk_mib", "8"], "kernels.chunk_mib", 8.0),
        (["--kernels.chunk_mib", "8", "--kernels.chunk_mib", "null"], "kernels.chunk_mib", None),
        (["--generation.think_start", ""], "generation.think_start", ""),
        (["--generation.think_start", "[a: b"], "generation.think_start", "[a: b"),
    ],
)
def test_dotted_overrides_are_read_in_their_type(
    override: list[str], key: str | None, value: object
) -> None:
    read: object = load_config(None, override)
    for part in (key or "generation.thinking_budget_tokens").split("."):
        read = getattr(read, part)
    assert read == value


def test_round_trip_through_json_is_the_same_configuration() -> None:
    config = load_config(None, ["--schedule.steps", "40", "--seed", "3"])
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["--schedule.step", "40"], ("schedule.step", "unknown key", "'40'", "max_lag_steps")),
        (["--schedule.step=40"], ("schedule.step", "unknown key", "'40'", "steps")),
        (["--shedule.steps", "40"], ("shedule", "unknown key", "the top level has", "schedule")),
        (["--seed.x", "1"], ("seed is {'x': '1'}", "integer")),
        (["--optimizer", "1"], ("optimizer is '1'", "OptimizerConfig")),
        (["steps", "40"], ("steps is not an option", "--KEY VALUE")),
        (["--schedule.steps"], ("--schedule.steps needs a value",)),
        (["--schedule.steps", "--seed", "3"], ("--schedule.steps needs a value",)),
        (["--no-seed"], ("--seed needs a value",)),
        (
            ["--schedule", "[1]", "--schedule.steps", "3"],
            ("--schedule.steps: schedule is ['1'] alr",),
        ),
    ],
)
def test_an_unknown_key_on_the_command_line_is_named_with_its_neighbors(
    overrides: list[str], parts: tuple[str, ...]
) -> None:
    refused(overrides, *parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("schedule:\n  step: 40\n", ("schedule.step", "unknown key", "40", "prompts_per_step")),
        ("modell: tiny_dense\n", ("modell", "unknown key", "tiny_dense", "output_dir")),
    ],
)
def test_an_unknown_key_in_the_file_is_named_with_its_neighbors(
    tmp_path: Path, text: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as e:
        load_config(yaml_file(tmp_path, text))
    for part in parts:
        assert part in str(e.value)


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("schedule.steps", "0", "greater than 0"),
        ("schedule.steps", "many", "integer"),
        ("schedule.steps", "2.5", "integer"),
        ("schedule.completions_per_prompt", "1", "greater than or equal to 2"),
        ("schedule.max_lag_steps", "-1", "greater than or equal to 0"),
        ("algorithm.loss", "ppo5", "cispo"),
        ("algorithm.loss.kind", "ppo5", "cispo"),
        ("algorithm.loss.max_ratio", "0", "greater than 0"),
        ("algorithm.no_positive_resampling_threshold", "1.5", "less than or equal to 1"),
        ("optimizer.learning_rate", "-1", "greater than 0"),
        ("optimizer.learning_rate", "nan", "finite"),
        ("optimizer.learning_rate", "inf", "finite"),
        ("timeouts.batch_seconds", "0", "greater than 0"),
        ("fit.compute", "hours", "device_hours"),
        ("metrics.wandb", "on", "offline"),
        ("precision.params", "fp16", "bf16"),
        ("model", "no/such/dir", "tiny_scout"),
    ],
)
def test_a_bad_value_is_named_with_what_would_be_right(key: str, value: str, right: str) -> None:
    refused([f"--{key}", value], key, value, right)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["--parallel.tensor", "2", "--roles.trainer_ranks", "3"],
            ("roles.trainer_ranks is 3", "multiple of parallel.tensor", "= 2"),
        ),
        (
            ["--parallel.expert", "3", "--roles.trainer_ranks", "4"],
            ("parallel.expert is 3", "must divide roles.trainer_ranks = 4"),
        ),
        (
            ["--roles.generator_ranks", "3", "--roles.generator_tensor_parallel", "2"],
            ("roles.generator_ranks is 3", "roles.generator_tensor_parallel = 2"),
        ),
        (["--parallel.sequence_parallel"], ("parallel.sequence_parallel", "parallel.tensor > 1")),
        (["--parallel.virtual_pipeline", "2"], ("virtual_pipeline is 2", "parallel.pipeline > 1")),
        (
            ["--generation.thinking_budget_tokens", "[20, 10]"],
            ("generation.thinking_budget_tokens is (20, 10)",),
        ),
        (
            ["--generation.interruption_phrase", "stop"],
            ("generation.interruption_phrase is 'stop'", "generation.think_end"),
        ),
        (
            ["--schedule.steps", "4", "--evaluation.first_step", "5"],
            ("evaluation.first_step is 5", "schedule.steps = 4"),
        ),
        (
            ["--schedule.steps", "50", "--metrics.token_dump_steps", "[0,50]"],
            ("metrics.token_dump_steps is (0, 50)", "0 to 49"),
        ),
        (
            ["--schedule.prompts_per_step", "100", "--task.train_prompts", "99"],
            ("schedule.prompts_per_step is 100", "task.train_prompts = 99"),
        ),
        (
            ["--parallel.overlap_param_gather", "--parallel.overlap_grad_reduce=false"],
            ("parallel.overlap_param_gather is true", "parallel.overlap_grad_reduce"),
        ),
        (
            ["--roles.one_gpu"],
            ("roles.one_gpu is true", "roles.trainer_ranks = 2, roles.generator_ranks = 1"),
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named_together(
    overrides: list[str], parts: tuple[str, ...]
) -> None:
    refused(overrides, *parts)


def test_all_bad_values_are_listed_at_once() -> None:
    refused(
        ["--schedule.steps", "0", "--optimizer.beta1", "2"], "schedule.steps", "optimizer.beta1"
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("schedule: [steps: 4\n", "not valid YAML"),
        ("- schedule\n- steps\n", "expected a mapping of keys, found list"),
        ("just words\n", "expected a mapping of keys, found str"),
        ("schedule: 4\n", "schedule"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(
    tmp_path: Path, text: str, parts: str
) -> None:
    path = yaml_file(tmp_path, text)
    with pytest.raises(ConfigError, match=parts):
        load_config(path)


def test_a_yaml_error_names_the_file_and_the_line(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "seed: 1\nschedule: [steps: 4\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: not valid YAML.*(?s:.)*line \d"):
        load_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such configuration file"):
        load_config(tmp_path / "none.yaml")


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(yaml_file(tmp_path, "# nothing yet\n")) == RunConfig()


def test_every_field_has_help_text_and_every_section_a_docstring() -> None:
    bad = [key for key, (*_, text) in LEAVES.items() if not re.search(r"..[.)]\s*$", text)]
    assert bad == [], "the help text is a sentence"
    assert [section for section in Section.__subclasses__() if not section.__doc__] == []


UNITS = (
    "steps step tokens prompts prompt completions ranks seconds bytes gib mib kib nats updates"
    " fraction ratio threshold weights points workers processes deaths verdicts tests retries"
    " gpus rows minutes batches restarts attempts share port"
)
# Numbers without a unit: sizes of a grid of ranks, Adam's constants, a seed, a count of folders.
PURE = {
    "algorithm.entropy_coefficient",
    "algorithm.kl_coefficient",
    "algorithm.loss.max_divergence",  # a probability or nats, by `divergence`
    "checkpoint.keep",
    "rollout.max_turns",
    "generation.temperature",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.clip_grad_norm",
    "optimizer.eps",
    "optimizer.learning_rate",
    "optimizer.weight_decay",
    "parallel.context",
    "parallel.expert",
    "parallel.expert_tensor",
    "parallel.pipeline",
    "parallel.tensor",
    "parallel.virtual_pipeline",
    "roles.generator_tensor_parallel",
    "seed",
    "sft.beta2",
    "sft.learning_rate",
    "tasks.<name>.level",
    "tasks.<name>.weight",
    "verifier.queue_size",
}


def test_a_number_has_its_unit_in_its_name() -> None:
    numbers = [
        key
        for key, (kind, *_) in LEAVES.items()
        if kind.split()[0] in ("int", "float") and "None" not in kind
    ]
    assert len(numbers) > 50
    units = set(UNITS.split())
    without = {key for key in numbers if not set(key.split(".")[-1].split("_")) & units}
    assert without - PURE == set()


def test_a_type_is_written_as_in_yaml_with_its_bounds() -> None:
    types = {key: kind for key, (kind, *_) in LEAVES.items()}
    assert types["resume"] == "bool | int >= 0"
    assert types["recipe"] == "str | None"
    assert types["schedule.steps"] == "int > 0"
    assert types["generation.thinking_budget_tokens"] == "tuple[int > 0, int > 0]"
    assert types["algorithm.length_max_tokens"] == "int > 0 | None"
    assert types["generation.interruption"] == "'phrase' | 'none'"
    assert types["generation.gpu_memory_fraction"] == "float >= 0 and <= 1"


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        (["--resume"], True),
        (["--resume", "true"], True),
        (["--resume=false"], False),
        (["--resume", "False", "--seed", "3"], False),
        (["--no-resume"], False),
        (["--resume", "1"], 1),
        (["--resume=0", "--seed", "3"], 0),
        (["--resume", "200"], 200),
    ],
)
def test_a_switch_may_have_a_value(overrides: list[str], value: bool | int) -> None:
    resume = load_config(None, overrides).resume
    assert (type(resume), resume) == (type(value), value)


def test_evaluation_sets_are_given_by_name(tmp_path: Path) -> None:
    one = "  {}: {{source: livecodebench@2025-01-01..2025-06-30, every_steps: 500}}\n"
    path = tmp_path / "run.yaml"
    path.write_text("evaluation:\n sets:\n" + one.format("lcb"))
    config = load_config(path, ["--evaluation.sets.lcb.samples_per_prompt", "4"])
    lcb = config.evaluation.sets["lcb"]
    assert (lcb.every_steps, lcb.samples_per_prompt) == (500, 4)
    assert load_config(save_config(config.model_copy(update={"output_dir": tmp_path}))) == (
        config.model_copy(update={"output_dir": tmp_path})
    )
    assert "evaluation.sets.<name>.every_steps" in LEAVES
    for name, message in (
        ("arithmetic", "'arithmetic' is that of a task"),
        ("a/b", "one of . / :"),
    ):
        path.write_text("evaluation:\n sets:\n" + one.format(name))
        with pytest.raises(ConfigError, match=message):
            load_config(path)
    with pytest.raises(ConfigError, match="evaluation.sets.lcb.source is missing"):
        load_config(None, ["--evaluation.sets.lcb.every_steps", "4"])


# ---------------------------------------------------------------- tasks


def test_one_task_needs_no_name() -> None:
    (name,) = RunConfig().tasks
    assert name == "arithmetic"
    config = load_config(None, ["--task.kind", "arithmetic", "--task.train_prompts=99"])
    assert config.tasks == {"arithmetic": ArithmeticTask(train_prompts=99)}
    assert load_config(None, ["--task", "arithmetic"]).tasks == RunConfig().tasks
    sums = ArithmeticTask(products="none")
    assert RunConfig(task=sums).tasks == {"arithmetic": sums}


def test_several_tasks_have_names_and_share_the_keys_of_task(tmp_path: Path) -> None:
    path = yaml_file(
        tmp_path,
        "task: {heldout_prompts: 48}\n"
        "tasks:\n"
        "  arithmetic: {weight: 3}\n"
        "  more: {kind: arithmetic, heldout_prompts: 7}\n",
    )
    assert load_config(path).tasks == {
        "arithmetic": ArithmeticTask(weight=3, heldout_prompts=48),
        "more": ArithmeticTask(heldout_prompts=7),
    }
    overridden = load_config(
        path, ["--task.heldout_prompts", "5", "--tasks.more.operand_weights", "[0, 1]"]
    ).tasks
    assert {name: task.heldout_prompts for name, task in overridden.items()} == {  # type: ignore[union-attr]
        "arithmetic": 5,
        "more": 7,
    }
    assert overridden["more"] == ArithmeticTask(heldout_prompts=7, operand_weights=(0, 1))


def test_a_mixture_survives_the_round_trip_through_json() -> None:
    sums = ["--tasks.sums.kind", "arithmetic", "--tasks.sums.seed", "3"]
    config = load_config(None, ["--tasks.arithmetic.weight", "2", *sums])
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert (config.seed_of("arithmetic"), config.seed_of("sums")) == (1234, 3)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["--task.foo", "1"], ("task.foo: unknown key (value '1'); task of kind arithmetic has",)),
        (
            ["--tasks.a.kind", "arithmetic", "--tasks.a.foo", "1"],
            ("tasks.a.foo: unknown key (value '1'); tasks.a of kind arithmetic has",),
        ),
        (["--tasks.x.weight", "1"], ("tasks.x.kind is missing", "jsonl")),
        (["--task.kind", "nope"], ("task.kind is 'nope'", "'reasoning'")),
        (["--tasks.m.kind", "jsonl"], ("tasks.m.path is missing",)),
        (["--task.weight", "0"], ("task.weight is '0'", "greater than 0")),
        (["--task", "x", "--task.weight", "2"], ("task.kind is 'x'", "'reasoning'")),
        (
            ["--task.kind", "jsonl", "--task.path", "x", "--task.verifier", "maths"],
            ("task.verifier is 'maths'", "package.module:function"),
        ),
        (
            ["--task.kind", "jsonl", "--task.path", "x", "--task.template", "no"],
            ("task.template is 'no'", "{prompt}"),
        ),
        (
            ["--task.kind", "jsonl", "--task.path", "x"],
            ("task.kind is 'jsonl'", "model = 'tiny_scout'", "start_checkpoint"),
        ),
        (
            [
                "--task.kind",
                "jsonl",
                "--task.path",
                "x",
                "--task.verifier",
                "custom",
                "--start_checkpoint",
                "y",
            ],
            ("task.verifier is 'custom'", "verifier.custom"),
        ),
        (
            [
                "--task.kind",
                "arithmetic",
                "--tasks.arithmetic.train_prompts",
                "2",
                "--tasks.sums.train_prompts",
                "3",
            ],
            (
                "schedule.prompts_per_step is 48",
                "tasks.arithmetic.train_prompts + tasks.sums.train_prompts = 5",
            ),
        ),
        (
            ["--verifier.think_end", "</t>"],
            ("verifier.think_end is '</t>'", "generation.think_end = '</think>'"),
        ),
        (["--verifier.worker", "2"], ("verifier.worker", "unknown key", "workers")),
    ],
)
def test_tasks_that_cannot_be_are_named(overrides: list[str], parts: tuple[str, ...]) -> None:
    refused(overrides, *parts)


def test_the_verifier_gets_the_markers_of_the_run() -> None:
    changed = ["--generation.think_end", "</t>", "--generation.interruption_phrase", "stop </t>"]
    assert load_config(None, changed).verifier.think_end == "</t>"
    values = load_config(None, ["--verifier.values.no_answer", "-1"]).verifier.values
    assert (values.no_answer, values.timed_out) == (-1.0, None)


def test_options_of_a_reasoning_task_have_the_types_of_yaml() -> None:
    options = [
        "--task.options.min_terms",
        "7",
        "--task.options.name",
        "x",
        "--start_checkpoint",
        "y",
    ]
    config = load_config(None, ["--task", "reasoning", "--task.dataset", "chain_sum", *options])
    assert config.tasks["reasoning"].options == {"min_terms": 7, "name": "x"}  # type: ignore[union-attr]
    subset = ["--task", "huggingface", "--task.source", "x", "--task.subset", "2024"]
    config = load_config(None, [*subset, "--start_checkpoint", "y", "--task.template", "{prompt}"])
    task = config.tasks["huggingface"]
    assert (task.subset, task.template) == ("2024", "{prompt}")  # type: ignore[union-attr]


def test_tiny_models_are_no_published_ones() -> None:
    from megatron_rl.config import NAMED_MODELS, TINY_MODELS
    from megatron_rl.models import CONFIG_FOLDER

    stems = sorted(path.stem for path in CONFIG_FOLDER.glob("*.json"))
    assert sorted([*NAMED_MODELS, *TINY_MODELS]) == stems
