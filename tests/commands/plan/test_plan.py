"""The memory plan: layouts that fit, reasons of those that do not, and proposals."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.commands.plan import dry_run
from megatron_rl.commands.plan.layouts import layout_problems, search, with_layout
from megatron_rl.commands.plan.memory import GIB, RESERVE_GIB, estimate
from megatron_rl.commands.plan.tensors import update_bytes
from megatron_rl.config import RunConfig, load_config
from megatron_rl.models import architecture, named_config

EXAMPLES = Path(__file__).parents[3] / "examples"
SCOUT, DENSE = "llama-4-scout-17b-16e", "llama-3.1-8b"
OF_192 = {"roles": {"gpu_gib": 192.0, "gpus_per_node": 4}}
"""Sections of a run on GPUs of 192 GiB, 4 per node; the default is 80 GiB and 8 per node."""


def run_of(model: str, **sections: Any) -> RunConfig:
    task = {"kind": "jsonl", "path": "data.jsonl"}
    return RunConfig.model_validate({"model": model, "task": task, **sections})


def exits(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as e:
        main(arguments)
    return int(e.value.code or 0)


@pytest.fixture(scope="module")
def scout() -> Any:
    return architecture(named_config(SCOUT))


@pytest.fixture(scope="module")
def dense() -> Any:
    return architecture(named_config(DENSE))


def test_states_of_a_dense_model_add_up_by_hand(dense: Any) -> None:
    run = run_of(DENSE)
    (stage,) = estimate(with_layout(run, 16, 64), dense).stages
    n = 8_030_261_248
    assert (stage.parameters, stage.gradients, stage.optimizer) == (2 * n, 4 * n, 12 * n / 16)
    (without,) = estimate(with_layout(run, 16, 64, distributed_optimizer=False), dense).stages
    assert without.optimizer == 12 * n
    run = run_of(DENSE, precision={"params": "fp32"})
    (fp32,) = estimate(with_layout(run, 1, 1), dense).stages
    assert (fp32.parameters, fp32.optimizer) == (4 * n, 8 * n)


def test_activations_of_a_layer_add_up_by_hand(dense: Any) -> None:
    # 16,465 tokens; H 4096, 32 heads and 8 groups of 128, F 14,336, bf16.
    run, tokens = run_of(DENSE), 16_465
    assert run.sequence_tokens == tokens
    norms, attention = 4 * 4096 * 2, (2 * 32 + 2 * 8) * 128 * 2 + 4 * 32
    mlp, edges = 3 * 14_336 * 2, 3 * 4096 * 2

    def of(**sizes: Any) -> float:
        stages = estimate(with_layout(run, 16, 64, **sizes), dense).stages
        return stages[0].activations / tokens

    layer = norms + attention + mlp
    assert of() == 32 * layer + edges
    assert of(recompute="full") == 32 * 4096 * 2 + layer + edges
    assert of(recompute="selective") == 32 * (norms + attention) + mlp + edges
    assert of(tensor=4, sequence_parallel=True) == pytest.approx((32 * layer + edges) / 4)
    assert of(tensor=4) == 32 * (norms + (attention + mlp) / 4) + edges
    assert of(context=2) == pytest.approx((32 * layer + edges) / 2, rel=1e-4)
    # 1F1B: the first of two stages holds two micro-batches of 16 layers.
    assert of(pipeline=2) == 2 * 16 * layer + edges / 3


def test_more_recomputation_and_sharding_keep_less(scout: Any) -> None:
    run = run_of(SCOUT)
    base = {"tensor": 4, "expert": 16, "sequence_parallel": True}
    sizes = [
        estimate(with_layout(run, 16, 64, **base, recompute=kind), scout).worst.activations
        for kind in ("full", "selective", "none")
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[2] / 5
    virtual = with_layout(run, 16, 64, pipeline=2, virtual_pipeline=2, expert=8)
    plain = with_layout(run, 16, 64, pipeline=2, expert=8)
    more, less = (estimate(x, scout).stages[0].activations for x in (virtual, plain))
    assert more / less == pytest.approx(1 + 1 / 4, rel=0.01)  # section 4.2.3: 1 + (p - 1) / (p v)


def test_a_misfit_names_what_is_too_large(scout: Any) -> None:
    sizes = {"tensor": 4, "expert": 16, "sequence_parallel": True, "recompute": "full"}
    memory = estimate(with_layout(run_of(SCOUT), 16, 64, **sizes), scout)
    trainers, generators = memory.misfits
    assert "on a rank of stage 0, but 74.0 GiB are available" in trainers
    assert "optimizer 75.3, gradients 32.9, parameters 16.4" in trainers
    assert "leave a KV cache of 0.0 GiB" in generators
    assert "raise roles.generator_tensor_parallel" in generators


def test_scout_on_80_gpus_of_192_and_of_80_gib_has_a_layout(scout: Any) -> None:
    large = search(run_of(SCOUT, **OF_192), scout, 80)
    small = search(run_of(SCOUT), scout, 80)
    best, tight = large[0].run.roles, small[0].run.roles
    assert (best.trainer_ranks, best.generator_ranks) == (16, 64)
    # 16 GPUs of 80 GiB are 1,280 GiB; training needs 18 bytes per parameter.
    assert tight.trainer_ranks * 74 * GIB > 18 * scout.parameters()
    for layouts in (large, small):
        assert len(layouts) == 5
        for layout in layouts:
            assert layout.run.roles.world_size == 80 and not layout.misfits
            assert not layout_problems(layout.run, scout)
            available = (layout.run.roles.gpu_gib - RESERVE_GIB) * GIB
            assert layout.worst.total <= available and layout.generator.sequences >= 1


def test_eight_gpus_do_not_hold_scout_and_the_nearest_layout_says_why(scout: Any) -> None:
    (nearest,) = search(run_of(SCOUT, roles={"gpu_gib": 192.0}), scout, 8)
    assert nearest.run.roles.world_size == 8 and "optimizer" in nearest.misfits[0]


@pytest.mark.parametrize(
    ("sizes", "reasons"),
    [
        ({"tensor": 3}, ["multiple of parallel.tensor", "3"]),
        ({"tensor": 16}, ["8 key-value heads", "40 attention heads"]),
        ({"expert": 32}, ["must divide roles.trainer_ranks"]),
        ({"tensor": 2}, ["a mixture of experts needs", "parallel.sequence_parallel"]),
        ({"pipeline": 16, "virtual_pipeline": 2}, ["virtual_pipeline is 2", "48 layers"]),
        (
            {"generator_tensor_parallel": 64},
            ["roles.generator_tensor_parallel is 64", "40 attention"],
        ),
    ],
)
def test_a_layout_that_divides_nothing_lists_the_reasons(
    scout: Any, sizes: dict[str, Any], reasons: list[str]
) -> None:
    problems = "\n".join(layout_problems(with_layout(run_of(SCOUT), 16, 64, **sizes), scout))
    for reason in reasons:
        assert reason in problems


def test_engines_and_tensor_groups_stay_in_a_node(scout: Any) -> None:
    def problems(*sizes: int, node: int, **parallel: Any) -> list[str]:
        run = run_of(SCOUT, roles={"gpus_per_node": node})
        return layout_problems(with_layout(run, *sizes, **parallel), scout)

    assert problems(16, 64, 2, node=4, tensor=4, sequence_parallel=True) == []
    (crossing,) = problems(6, 8, 4, node=8)
    assert "the engine of ranks 6-9 spans two nodes of 8 GPUs" in crossing
    (wide,) = problems(16, 64, node=4, tensor=8, sequence_parallel=True)
    assert "parallel.tensor is 8: a node has 4 GPUs" in wide


def test_an_update_moves_the_model_in_the_generators_format(dense: Any) -> None:
    assert update_bytes(run_of(DENSE), dense) == 2 * 8_030_261_248
    linear, tables, norms = 32 * 218_103_808, 2 * 128_256 * 4096, 65 * 4096
    fp8 = update_bytes(run_of(DENSE, weights={"quantization": "fp8"}), dense)
    assert fp8 == linear + 4 * linear // 128**2 + 2 * (tables + norms)


def test_the_command_prints_the_plan_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scout_yaml, out = str(EXAMPLES / "scalerl_scout.yaml"), tmp_path / "plan.json"
    assert exits(["plan", scout_yaml, "--world", "80", "--json", str(out)]) == 0
    output = capsys.readouterr().out
    for text in ("107,769,861,120 parameters", "8,826,393,600", "fits 80 GPUs of 186 GiB"):
        assert text in output
    content = json.loads(out.read_text())
    assert content["configured"]["misfits"] == [] and content["proposed"] == []
    machine = ["--roles.gpu_gib", "80", "--roles.gpus_per_node", "8"]
    arguments = ["plan", scout_yaml, "--world", "80", *machine]
    assert exits([*arguments, "--json", str(out)]) == 0
    output = capsys.readouterr().out
    assert (
        "the configured layout does not fit:" in output
        and "proposed: --roles.trainer_ranks 32" in output
    )
    proposed = json.loads(out.read_text())["proposed"][0]
    # The same command with the proposed options fits.
    options = output.partition("proposed: ")[2].splitlines()[0].split()
    assert exits([*arguments, *options]) == 0
    assert "fits 80 GPUs of 80 GiB" in capsys.readouterr().out
    assert proposed["layout"]["roles"]["trainer_ranks"] == 32


def test_a_world_of_another_size_and_one_that_nothing_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    yaml = str(EXAMPLES / "scalerl_scout.yaml")
    assert exits(["plan", yaml, "--world", "8", "--roles.gpu_gib", "192"]) == 3
    output = capsys.readouterr().out
    assert "the configuration has 80 ranks" in output and "but --world is 8" in output
    assert "no layout fits; the nearest is" in output


def test_options_of_the_configuration_follow_a_configuration_of_either_form(
    capsys: pytest.CaptureFixture[str],
) -> None:
    yaml, options = str(EXAMPLES / "scalerl_scout.yaml"), ["--roles.gpu_gib", "80"]
    codes = [exits(["plan", *form, *options]) for form in ([yaml], ["--config", yaml])]
    printed = capsys.readouterr().out
    assert codes[0] == codes[1]
    assert printed[: len(printed) // 2] == printed[len(printed) // 2 :]
    assert exits(["plan", yaml, "--config", yaml]) == 2
    assert "two configurations" in capsys.readouterr().err


def test_a_missing_configuration_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(["plan", str(tmp_path / "no.yaml")]) == 2
    assert "no such configuration file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["scalerl_8b", "scalerl_8b_node", "scalerl_scout"])
def test_the_examples_fit_their_hardware_with_the_papers_values(name: str) -> None:
    run = load_config(EXAMPLES / f"{name}.yaml")
    s, g, o = run.schedule, run.generation, run.optimizer
    assert (s.prompts_per_step, s.completions_per_prompt, s.max_lag_steps) == (48, 16, 8)
    assert (o.learning_rate, o.warmup_steps, o.eps, o.weight_decay) == (5e-7, 100, 1e-15, 0.01)
    budgets = g.max_prompt_tokens + g.thinking_budget_tokens[1] + g.answer_budget_tokens
    assert budgets == 16_384 and run.precision.logits == "fp32"
    arch, roles = architecture(named_config(run.model)), run.roles
    assert not layout_problems(run, arch)
    memory = estimate(run, arch)
    assert (memory.misfits, memory.notes) == ([], [])
    assert roles.world_size == (8 if name.endswith("node") else 80)


@pytest.mark.parametrize("name", ["scalerl_8b", "scalerl_scout"])
def test_the_dry_run_of_an_example_needs_no_gpu_and_no_checkpoint(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = EXAMPLES / f"{name}.sh"
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert exits(["train", "--config", str(EXAMPLES / f"{name}.yaml"), "--dry-run"]) == 0
    output = capsys.readouterr().out
    for text in (
        "learning_rate: 5.0e-07", "768 completions", "nodes 0-3 (ranks 0-15)",
        "start_checkpoint: not set", "fits 80 GPUs of 186 GiB",
        f"--nnodes 20 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 {script}",
    ):  # fmt: skip
        assert text in output, text
    monkeypatch.setenv("RANK", "1")  # under torchrun one rank says it
    main_returns = exits(["train", "--config", str(EXAMPLES / f"{name}.yaml"), "--dry-run"])
    assert (main_returns, capsys.readouterr().out) == (0, "")


def test_paths_are_looked_for_and_launch_lines_repeat_the_options(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "config.json").write_text("{}")
    run = run_of(
        DENSE,
        start_checkpoint=str(tmp_path / "start"),
        output_dir=str(tmp_path / "runs" / "a"),
        roles={"trainer_ranks": 2, "generator_ranks": 1},
    )
    lines = dry_run.path_lines(run)
    assert any("can be created" in line for line in lines)
    assert any(line.startswith("start_checkpoint") and "found" in line for line in lines)
    assert "task.path: data.jsonl: missing" in lines
    (line,) = dry_run.launch_lines(run, Path("my.yaml"), ["--seed", "3"])
    assert line.startswith("torchrun --nproc-per-node 3") and line.endswith("--seed 3")
    assert dry_run.node_lines(run) == [
        "node 0 (ranks 0-2): 2 trainer ranks; 1 generator ranks, 1 engine(s) each"
    ]


def test_a_named_model_is_refused_without_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_rl.config import ConfigError
    from megatron_rl.models.start_checkpoint import start_directory

    with pytest.raises(ConfigError, match=r"start_checkpoint is missing: model = 'llama-3.1-8b'"):
        start_directory(run_of(DENSE))
    for file, text in (("config.json", '{"model_type": "qwen3"}'), ("tokenizer.json", "{}")):
        (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=r"has model_type 'qwen3' and .* is 'llama'"):
        start_directory(run_of(DENSE, start_checkpoint=str(tmp_path)))


def test_a_plan_states_the_disk_of_rollout_files(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(EXAMPLES / "scalerl_8b.yaml")
    run = load_config(path)
    lines = []
    for options in ([], ["--metrics.rollouts_gib", "0.5"], ["--metrics.rollouts_every_steps", "0"]):
        exits(["plan", path, *options])
        (line,) = re.findall(r"^rollout files: (.*)$", capsys.readouterr().out, re.MULTILINE)
        lines.append(line)
    completions = run.schedule.prompts_per_step * run.schedule.completions_per_prompt
    step = completions * run.sequence_tokens * 12 / 1e6
    assert lines[0].startswith(f"at most {step:,.1f} MB a step (12 bytes a token), 21,474.8 MB of")
    assert ", 536.9 MB of steps" in lines[1] and lines[2] == "none"
