"""Jobs of a study for SLURM and Kubernetes, made from a template: one job per unfinished run.

The templates are examples/cluster/slurm.sh and examples/cluster/kubernetes.yaml, or copies with
another partition, image, claim or memory. Each job has the complete configuration of its run.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from megatron_rl import recipes
from megatron_rl.commands.study.runs import Run
from megatron_rl.config import ConfigError

NAME_LENGTH = 57  # of a pod with its index and a Service, 63
KEEPS_NAME = {"command", "exec", "image", "data"}


def write(runs: list[Run], study: str, template: Path, folder: Path) -> list[Path]:
    """Write the jobs of these runs into a folder; returns the files to submit.

    Raises:
        ConfigError: a run without weights, with a budget, with a relative output on Kubernetes, or
            with a name that no job can have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {re.sub("[^a-z0-9]+", "-", f"{study}/{run.name}".lower()): run for run in runs}
    for name, run in jobs.items():
        if run.config.start_checkpoint is None or run.supervised:
            raise ConfigError(f"{run.name}: start_checkpoint is missing: a job needs its weights")
        if run.budget:
            raise ConfigError(f"{run.name}: no job watches a budget; leave it out, set steps")
        if len(name) > NAME_LENGTH or len(jobs) < len(runs):
            raise ConfigError(f"{name}: no name of a job; name the entry, in {NAME_LENGTH} letters")
    if template.suffix == ".sh":
        return _slurm(jobs, template, folder)
    return [_kubernetes(name, run, template, folder) for name, run in jobs.items()]


def _configuration(run: Run) -> str:
    """Return all values of a run as YAML; a recipe's file, which a job may not see, is in them."""
    values = run.config.model_dump(mode="json", exclude={"resume"})
    if values["recipe"] not in recipes.names():
        values["recipe"] = None
    return yaml.safe_dump(values, sort_keys=False, width=100, allow_unicode=True)


def _nodes(run: Run) -> int:
    return -(-run.config.roles.devices // run.config.roles.gpus_per_node)


def _slurm(jobs: dict[str, Run], template: Path, folder: Path) -> list[Path]:
    script, submit = folder / template.name, folder / "submit.sh"
    script.write_text(template.read_text())
    lines = ["#!/usr/bin/env bash", "# A job waits for another of its name.", "set -euo pipefail"]
    for name, run in jobs.items():
        config = (folder / f"{name}.yaml").resolve()
        config.write_text(_configuration(run))
        lines.append(shlex.join([
            "sbatch", f"--job-name={name}", "--dependency=singleton", f"--nodes={_nodes(run)}",
            f"--gpus-per-node={run.config.roles.gpus_per_node}",
            f"--export=ALL,OUTPUT_DIR={run.config.output_dir.resolve()}",
            str(script.resolve()), str(config),
        ]))  # fmt: skip
    submit.write_text("\n".join(lines) + "\n")
    return [submit]


def _kubernetes(name: str, run: Run, template: Path, folder: Path) -> Path:
    output, roles = run.config.output_dir, run.config.roles
    if not output.is_absolute():
        raise ConfigError(f"--output is {output}: give a path on the volume that the pods share")
    objects = list(yaml.safe_load_all(template.read_text()))
    before = next(o["metadata"]["name"] for o in objects if o["kind"] == "Job")
    objects = [_renamed(each, before, name) for each in objects]
    for each in objects:
        if each["kind"] == "ConfigMap":
            each["data"] = {"run.yaml": _configuration(run)}
        elif each["kind"] == "Job":
            spec = each["spec"]
            spec["completions"] = spec["parallelism"] = _nodes(run)
            (container,) = spec["template"]["spec"]["containers"]
            values = {"NODES": str(_nodes(run)), "OUTPUT": str(output)}
            for variable in container["env"]:
                if variable["name"] in values:
                    variable["value"] = values[variable["name"]]
            option, per_node = r"(?<=--nproc-per-node=)\d+", str(roles.gpus_per_node)
            container["args"] = [re.sub(option, per_node, text) for text in container["args"]]
            container["resources"]["limits"]["nvidia.com/gpu"] = per_node
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump_all(objects, sort_keys=False, width=100))
    return path


def _renamed(node: Any, old: str, new: str) -> Any:
    """Return a tree with another name of the job in it, commands and images apart."""
    if isinstance(node, dict):
        return {k: v if k in KEEPS_NAME else _renamed(v, old, new) for k, v in node.items()}
    if isinstance(node, list):
        return [_renamed(item, old, new) for item in node]
    return node.replace(old, new) if isinstance(node, str) else node
