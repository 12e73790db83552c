"""`megatron-rl train --dry-run`: the whole plan of a run, without GPUs or weights."""

import itertools
import os
import sys
from pathlib import Path

import yaml

from megatron_rl.commands.plan.cli import memory_plan
from megatron_rl.commands.plan.nodes import nodes_name, nodes_of
from megatron_rl.config import TINY_MODELS, HuggingFaceTask, JsonlTask, RunConfig
from megatron_rl.models.start_checkpoint import FETCHED_MODELS, fetched_folder
from megatron_rl.orchestrator.run_plan import print_plan


def dry_run(config: RunConfig, path: Path | None, overrides: list[str]) -> int:
    """Print configuration, roles, paths, memory plan and launch lines; return the plan's status."""
    print("# configuration")
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip())
    print("\n# plan", flush=True)
    print_plan(config)
    print("\n# nodes", *node_lines(config), sep="\n")
    print("\n# paths", *path_lines(config), sep="\n")
    print("\n# memory")
    status = memory_plan(config)
    print("\n# start", *launch_lines(config, path, overrides), sep="\n")
    return status


def node_lines(config: RunConfig) -> list[str]:
    """Return the roles of each node, neighbors with the same roles in one line."""
    r, nodes, lines = config.roles, nodes_of(config).ranks, []

    def roles(node: int) -> str:
        generators = [rank - r.trainer_ranks for rank in nodes[node] if rank >= r.trainer_ranks]
        engines = len({rank // r.generator_tensor_parallel for rank in generators})
        trainers = len(nodes[node]) - len(generators)
        parts = [f"{trainers} trainer ranks"] * bool(trainers)
        parts += [f"{len(generators)} generator ranks, {engines} engine(s)"] * bool(generators)
        return "; ".join(parts)

    for text, group in itertools.groupby(range(len(nodes)), roles):
        first, *rest = group
        last = rest[-1] if rest else first
        span = f"{nodes_name(first, last)} (ranks {nodes[first][0]}-{nodes[last][-1]})"
        lines.append(f"{span}: {text} each")
    return lines


def path_lines(config: RunConfig) -> list[str]:
    """Return each path of the configuration and whether it exists."""
    parent = next(p for p in (config.output_dir, *config.output_dir.parents) if p.exists())
    writable = "can be created" if os.access(parent, os.W_OK) else f"{parent} is not writable"
    lines = [f"output_dir: {config.output_dir}: {writable}"]

    def add(key: str, path: Path, inside: str = "") -> None:
        lines.append(f"{key}: {path}: {'found' if (path / inside).exists() else 'missing'}")

    if config.start_checkpoint is not None:
        add("start_checkpoint", config.start_checkpoint, "config.json")
    elif Path(config.model).is_dir():
        add("model", Path(config.model), "config.json")
    elif config.model in FETCHED_MODELS:
        add("model", fetched_folder(config.model), "config.json")
    elif config.model not in TINY_MODELS:
        lines.append("start_checkpoint: not set; give the Hugging Face directory to start from")
    for name, task in config.tasks.items():
        if isinstance(task, JsonlTask):
            add(f"{config.task_key(name)}.path", task.path)
        elif isinstance(task, HuggingFaceTask) and Path(task.source).is_absolute():
            add(f"{config.task_key(name)}.source", Path(task.source))
    if config.weights.directory is not None:
        add("weights.directory", config.weights.directory)
    return lines


def launch_lines(config: RunConfig, path: Path | None, overrides: list[str]) -> list[str]:
    """Return the commands that start the run, on one node or on each of several."""
    script = [sys.argv[0]] if sys.argv[0].endswith(".sh") else ["-m", "megatron_rl.cli", "train"]
    if path is not None and script[0] == "-m":
        script += ["--config", str(path)]
    command = " ".join([*script, *overrides])
    ranks, nodes = config.roles.world_size, nodes_of(config).ranks
    if len(nodes) == 1:
        return [f"torchrun --nproc-per-node {ranks} {command}"]
    if ranks % (per_node := len(nodes[0])):
        text = f"{ranks} ranks do not fill nodes of {per_node} GPUs, but torchrun starts the same"
        return [f"{text} number on every node; change roles"]
    return [
        f"on each of {len(nodes)} nodes, HEAD being one of them:",
        f"torchrun --nnodes {len(nodes)} --nproc-per-node {per_node} --rdzv-backend c10d"
        f" --rdzv-endpoint $HEAD:29500 {command}",
    ]
