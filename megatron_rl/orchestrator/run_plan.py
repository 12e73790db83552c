"""The plan of a run: the role of each rank, and the sizes that follow from the configuration."""

from megatron_rl.config import DataSetTask, RunConfig
from megatron_rl.metrics.terminal import print_table
from megatron_rl.orchestrator.evaluation import evaluation_steps

_SHOWN_STEPS = 20


def print_plan(config: RunConfig) -> None:
    """Print the plan as a table; `ConfigError` for sequences longer than the model allows."""
    config.check_length()
    r, p, s, g = config.roles, config.parallel, config.schedule, config.generation
    first, last = r.trainer_ranks, r.world_size - 1
    completions = s.prompts_per_step * s.completions_per_prompt
    ahead = (s.max_lag_steps + 1) * s.prompts_per_step
    heldout = sum(t.heldout_prompts for t in config.tasks.values())
    lines = {
        "recipe": config.recipe or "none",
        "model": config.model,
        "trainer": f"ranks {_ranks(0, first - 1)}: tensor {p.tensor} x pipeline {p.pipeline} x"
        f" context {p.context} x data {config.data_parallel}; expert {p.expert} (expert tensor"
        f" {p.expert_tensor})",
        "generators": f"ranks {_ranks(first, last)}: {r.engines} vLLM engine(s) of"
        f" {r.generator_tensor_parallel} rank(s), {g.concurrent_completions} concurrent completions"
        " each",
        "orchestrator": "one process on the node of rank 0",
        "precision": f"{config.precision.params} parameters, {config.precision.logits} logits on"
        f" the trainer, {config.precision.generator_head} on generators; {config.kernels.head} loss"
        " over the LM head",
        "algorithm": config.algorithm.summary(),
        "one step": f"{s.prompts_per_step} prompts x {s.completions_per_prompt} completions ="
        f" {completions} completions over all ranks; micro-batches up to {s.micro_batch_tokens}"
        " tokens",
        "run": f"{s.steps} steps = {s.steps * s.prompts_per_step} prompts,"
        f" {s.steps * completions} completions",
        "lag": f"{s.summary()}: at most {s.max_lag_steps} steps, up to {ahead} prompts generated"
        " ahead",
        "tokens": f"prompt <= {g.max_prompt_tokens}, {_lengths(config)}; sequence <="
        f" {config.sequence_tokens}",
        "evaluation": f"{heldout} held-out prompts x {config.evaluation.samples_per_prompt}, at"
        f" steps {_steps(evaluation_steps(config.evaluation, s.steps))}",
        **{
            f"evaluation.sets.{name}": f"{one.source} x {one.samples_per_prompt}, every"
            f" {one.every_steps} steps"
            for name, one in config.evaluation.sets.items()
        },
        **{config.task_key(name): _task(config, name) for name in config.tasks},
        "output": str(config.output_dir),
    }
    print_table("Plan", lines.items())


def _ranks(first: int, last: int) -> str:
    return f"{first}-{last}" if last > first else f"{first}"


def _steps(steps: list[int]) -> str:
    if len(steps) <= _SHOWN_STEPS:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:6]))}, ..., {steps[-1]} ({len(steps)} evaluations)"


def _lengths(config: RunConfig) -> str:
    g = config.generation
    if g.interruption == "none":
        return f"thinking and answer <= {g.completion_tokens}, not interrupted"
    low, high = g.thinking_budget_tokens
    budget = low if low == high else f"{low}-{high}"
    return f"thinking interrupted at {budget}, answer <= {g.answer_budget_tokens}"


def _task(config: RunConfig, name: str) -> str:
    task = config.tasks[name]
    share = task.weight / sum(t.weight for t in config.tasks.values())
    pool = "all" if task.train_prompts is None else f"{task.train_prompts}"
    verifier = f" with verifier {task.verifier}" if isinstance(task, DataSetTask) else ""
    return (
        f"{task.kind}{verifier}: {share:.0%} of the prompts, from a pool of {pool};"
        f" {task.heldout_prompts} held out"
    )
