"""`megatron-rl train --dry-run`: everything that a run would do, without GPUs or weights."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import yaml

from megatron_rl.commands.plan.cli import memory_plan
from megatron_rl.commands.plan.generator_memory import Assumptions
from megatron_rl.config import TINY_MODELS, HuggingFaceTask, JsonlTask, RunConfig
from megatron_rl.orchestrator.run_plan import print_plan


def dry_run(config: RunConfig, path: Path | None, overrides: list[str]) -> int:
    """Prints the resolved configuration, roles, paths, memory plan and launch lines.

    Returns:
        Exit status: that of `megatron-rl plan`. Paths that are missing are said, and no error.
    """
    print("# configuration")
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip())
    print("\n# plan", flush=True)
    print_plan(config)
    print("\n# nodes")
    for line in node_lines(config):
        print(line)
    print("\n# paths")
    for line in path_lines(config):
        print(line)
    print("\n# memory")
    status = memory_plan(config, None, Assumptions(config.roles.gpu_gib))
    print("\n# start")
    for line in launch_lines(config, path, overrides):
        print(line)
    return status


def node_lines(config: RunConfig) -> list[str]:
    """Roles by node, alike neighbours together."""
    r = config.roles
    roles = []
    for rank in range(r.world_size):
        engine = (rank - r.trainer_ranks) // r.generator_tensor_parallel
        roles.append("trainer" if rank < r.trainer_ranks else f"engine {engine}")
    nodes = [roles[i : i + r.gpus_per_node] for i in range(0, len(roles), r.gpus_per_node)]
    kinds = []
    for node in nodes:
        trainers = sum(role == "trainer" for role in node)
        engines = len({role for role in node if role != "trainer"})
        kinds.append((trainers, len(node) - trainers, engines))
    lines, begin = [], 0
    for i, kind in enumerate(kinds):
        if i + 1 < len(kinds) and kinds[i + 1] == kind:
            continue
        trainers, generators, engines = kind
        first = begin * r.gpus_per_node
        last = min((i + 1) * r.gpus_per_node, r.world_size) - 1
        which = f"node {begin}" if begin == i else f"nodes {begin}-{i}"
        parts = [f"{trainers} trainer ranks"] * (trainers > 0)
        parts += [f"{generators} generator ranks, {engines} engine(s)"] * (generators > 0)
        lines.append(f"{which} (ranks {first}-{last}): {'; '.join(parts)} each")
        begin = i + 1
    return lines


def path_lines(config: RunConfig) -> list[str]:
    """Each path of the configuration, and whether it is there."""
    found: list[tuple[str, Path | None, str]] = []
    start = config.start_checkpoint
    if start is not None:
        found.append(("start_checkpoint", start, "config.json"))
    elif config.model not in TINY_MODELS:
        is_directory = Path(config.model).is_dir()
        named = "start_checkpoint", None, "give the Hugging Face directory to start from"
        found.append(("model", Path(config.model), "config.json") if is_directory else named)
    for name, task in config.tasks.items():
        if isinstance(task, JsonlTask):
            found.append((f"{config.task_key(name)}.path", task.path, ""))
        elif isinstance(task, HuggingFaceTask) and Path(task.source).is_absolute():
            found.append((f"{config.task_key(name)}.source", Path(task.source), ""))
    if config.weights.directory is not None:
        found.append(("weights.directory", config.weights.directory, ""))
    parent = next(p for p in (config.output_dir, *config.output_dir.parents) if p.exists())
    writable = "can be made" if os.access(parent, os.W_OK) else f"{parent} is not writable"
    lines = [f"output_dir: {config.output_dir}: {writable}"]
    for key, path, inside in found:
        if path is None:
            lines.append(f"{key}: not set; {inside}")
        else:
            there = (path / inside if inside else path).exists()
            lines.append(f"{key}: {path}: {'found' if there else 'missing'}")
    return lines


def launch_lines(config: RunConfig, path: Path | None, overrides: list[str]) -> list[str]:
    """What to type, on one node or on each of several."""
    script = [sys.argv[0]] if sys.argv[0].endswith(".sh") else ["-m", "megatron_rl.cli", "train"]
    if path is not None and script[0] == "-m":
        script += ["--config", str(path)]
    command = " ".join([*script, *overrides])
    ranks, per_node = config.roles.world_size, config.roles.gpus_per_node
    nodes = math.ceil(ranks / per_node)
    if nodes == 1:
        return [f"torchrun --nproc-per-node {ranks} {command}"]
    if ranks % per_node:
        return [
            f"{ranks} ranks do not fill nodes of {per_node} GPUs: torchrun starts as many on every"
            " node; change roles"
        ]
    return [
        f"on each of {nodes} nodes, HEAD being one of them:",
        f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d"
        f" --rdzv-endpoint $HEAD:29500 {command}",
    ]
