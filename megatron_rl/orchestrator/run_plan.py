"""The resolved plan of a run: who does what on which rank, and the sizes that follow."""

from __future__ import annotations

from megatron_rl.config import DataSetTask, RunConfig
from megatron_rl.orchestrator.evaluation import evaluation_steps


def plan_lines(config: RunConfig) -> list[tuple[str, str]]:
    """(what, how much) of everything that the configuration decides, in words and units."""
    r, p, s, g = config.roles, config.parallel, config.schedule, config.generation
    trainers = f"0-{r.trainer_ranks - 1}" if r.trainer_ranks > 1 else "0"
    first, last = r.trainer_ranks, r.world_size - 1
    generators = f"{first}-{last}" if last > first else f"{first}"
    completions = s.prompts_per_step * s.completions_per_prompt
    low, high = g.thinking_budget_tokens
    length = f"thinking and answer <= {g.completion_tokens}, not interrupted"
    if g.interruption == "phrase":
        length = (
            f"thinking interrupted at {low if low == high else f'{low}-{high}'},"
            f" answer <= {g.answer_budget_tokens}"
        )
    ahead = (s.max_lag_steps + 1) * s.prompts_per_step
    steps = evaluation_steps(config.evaluation, s.steps)
    return [
        ("recipe", config.recipe or "none"),
        ("model", config.model),
        (
            "trainer",
            f"ranks {trainers}: tensor {p.tensor} x pipeline {p.pipeline} x context {p.context} x"
            f" data {config.data_parallel}; expert {p.expert} (expert tensor {p.expert_tensor})",
        ),
        (
            "generators",
            f"ranks {generators}: {r.engines} vLLM engine(s) of {r.generator_tensor_parallel}"
            f" rank(s), {g.concurrent_completions} completions at once each",
        ),
        ("orchestrator", "one process beside rank 0"),
        (
            "precision",
            f"{config.precision.params} parameters, {config.precision.logits} logits on trainer and"
            f" generators; {config.kernels.head} loss over the LM head",
        ),
        (
            "algorithm",
            config.algorithm.summary(),
        ),
        (
            "one step",
            f"{s.prompts_per_step} prompts x {s.completions_per_prompt} completions ="
            f" {completions} completions over all ranks; micro-batches up to"
            f" {s.micro_batch_tokens} tokens",
        ),
        (
            "run",
            f"{s.steps} steps = {s.steps * s.prompts_per_step} prompts,"
            f" {s.steps * completions} completions",
        ),
        (
            "lag",
            f"{s.summary()}: at most {s.max_lag_steps} steps, up to {ahead} prompts generated"
            " ahead",
        ),
        (
            "tokens",
            f"prompt <= {g.max_prompt_tokens}, {length}; sequence <= {config.sequence_tokens}",
        ),
        (
            "evaluation",
            f"{sum(t.heldout_prompts for t in config.tasks.values())} held-out prompts x"
            f" {config.evaluation.samples_per_prompt}, at steps"
            f" {', '.join(str(x) for x in steps)}",
        ),
        *((config.task_key(name), _task(config, name)) for name in config.tasks),
        ("output", str(config.output_dir)),
    ]


def _task(config: RunConfig, name: str) -> str:
    task = config.tasks[name]
    share = task.weight / sum(t.weight for t in config.tasks.values())
    pool = "all" if task.train_prompts is None else f"{task.train_prompts}"
    judge = f", judged by {task.verifier}" if isinstance(task, DataSetTask) else ""
    return (
        f"{task.kind}{judge}: {share:.0%} of the prompts, from a pool of {pool};"
        f" {task.heldout_prompts} held out"
    )


def print_plan(config: RunConfig) -> None:
    """Print the plan as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Plan", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for what, how in plan_lines(config):
        table.add_row(what, how)
    Console().print(table)
