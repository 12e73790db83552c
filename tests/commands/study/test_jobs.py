"""The jobs of a study are valid, and each starts its run with all its values."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_rl.commands.study import jobs, study_file
from megatron_rl.commands.study.runs import Run
from megatron_rl.config import ConfigError, load_config

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
SLURM = ROOT / "examples" / "cluster" / "slurm.sh"
KUBERNETES = ROOT / "examples" / "cluster" / "kubernetes.yaml"


def fig2(output: Path, **changes: object) -> list[Run]:
    start = Path("/shared/models/8b")
    return study_file.load("fig2", changes, output, (), start, ("--schedule.steps", "500")).runs()


def test_slurm_gets_one_valid_job_for_each_run(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    runs = fig2(tmp_path / "out put", seeds=2)
    (submit,) = jobs.write(runs, "fig2", SLURM, folder)
    subprocess.run([BIN / "shellcheck", submit, folder / "slurm.sh"], check=True, timeout=60)
    sbatch = tmp_path / "sbatch"
    # Stands for SLURM: exports what the job is given, and prints what a node would start.
    sbatch.write_text(
        '#!/bin/bash\necho "$1 $3 $4"\nexport "${5#--export=ALL,}"\n'
        "export SLURM_JOB_NUM_NODES=20 SLURM_GPUS_ON_NODE=4 DRY_RUN=1\n"
        'exec bash "$6" "$7"\n'
    )
    sbatch.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    shown = subprocess.check_output(
        ["bash", submit], env={**os.environ, "PATH": path}, text=True, timeout=60
    ).splitlines()
    assert len(shown) == 2 * len(runs) == 20
    for run, options, line in zip(runs, shown[::2], shown[1::2], strict=True):
        name = f"fig2-{run.name.replace('/', '-')}"
        assert options == f"--job-name={name} --nodes=20 --gpus-per-node=4"
        words = shlex.split(line)
        assert words[words.index("--output_dir") + 1] == str(tmp_path / "out put" / run.name)
        assert load_config(words[words.index("--config") + 1]) == run.config


def test_kubernetes_gets_one_valid_job_for_each_run(tmp_path: Path) -> None:
    runs = fig2(Path("/shared/runs/fig2"))
    paths = jobs.write(runs, "fig2", KUBERNETES, tmp_path)
    validate = [BIN / "kubernetes-validate", "--strict", "--quiet"]
    subprocess.run([*validate, *paths], check=True, timeout=200)
    template = list(yaml.safe_load_all(KUBERNETES.read_text()))
    for run, path in zip(runs, paths, strict=True):
        service, config, job = yaml.safe_load_all(path.read_text())
        name = f"fig2-{run.group}-seed-1"
        assert {each["metadata"]["name"] for each in (service, config, job)} == {name}
        assert service["spec"]["selector"] == {"job-name": name}
        pod = job["spec"]["template"]["spec"]
        assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (20, 20)
        assert pod["subdomain"] == pod["volumes"][0]["configMap"]["name"] == name
        (container,) = pod["containers"]
        values = {each["name"]: each["value"] for each in container["env"]}
        own = {"NODES": "20", "OUTPUT": f"/shared/runs/fig2/{run.name}"}
        assert values == own | {"HF_HOME": "/shared/huggingface"}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
        (text,) = container["args"]
        assert f"--rdzv-endpoint={name}-0.{name}:29500 --rdzv-id={name}" in text
        assert "--nproc-per-node=4" in text
        before = template[2]["spec"]["template"]["spec"]["containers"][0]
        assert container["livenessProbe"] == before["livenessProbe"]
        (tmp_path / "run").write_text(config["data"]["run.yaml"])
        assert load_config(tmp_path / "run") == run.config


def test_a_recipe_of_a_file_is_in_the_jobs_configuration(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("summary: s\nsource: t\nbase: grpo\nvalues: {optimizer: {beta2: 0.9}}\n")
    runs = fig2(tmp_path / "out", runs=[{"recipe": str(own)}])
    jobs.write(runs, "mine", SLURM, tmp_path / "jobs")
    own.unlink()
    config = load_config(tmp_path / "jobs" / "mine-own-seed-1.yaml")
    assert config.optimizer.beta2 == 0.9
    assert config == runs[0].config.model_copy(update={"recipe": None})


def test_runs_that_no_job_can_have_are_refused(tmp_path: Path) -> None:
    weightless = study_file.load("fig2", {}, tmp_path).runs()
    tiny = study_file.load("ablation", {}, tmp_path).runs()
    long = [{"recipe": "grpo", "name": "a" * 60}]
    for runs, template, message in (
        (weightless, SLURM, "start_checkpoint is missing"),
        (tiny, SLURM, "start_checkpoint is missing"),
        (fig2(tmp_path, budget={"tokens": 3}), SLURM, "no job watches a budget"),
        (fig2(tmp_path, runs=long), KUBERNETES, "no name of a job"),
        (fig2(Path("runs")), KUBERNETES, "give a path on the volume"),
    ):
        with pytest.raises(ConfigError, match=message):
            jobs.write(runs, "fig2", template, tmp_path / "jobs")
