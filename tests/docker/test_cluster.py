"""The launch examples for Docker, SLURM and Kubernetes are valid and start the right command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SLURM = ROOT / "examples" / "cluster" / "slurm.sh"
KUBERNETES = ROOT / "examples" / "cluster" / "kubernetes.yaml"


def slurm(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with SLURM commands that only print their arguments."""
    for name, text in {
        "scontrol": "echo node-7; echo node-8",
        "srun": 'printf "%s|" "$@"; echo',
    }.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    return subprocess.run(
        ["bash", SLURM, *arguments], cwd=folder, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **variables},
    )  # fmt: skip


def test_the_slurm_script_passes_its_linter_and_requires_a_configuration():
    subprocess.run([BIN / "shellcheck", SLURM], check=True, timeout=60)
    assert subprocess.run(["bash", SLURM], capture_output=True).returncode == 2


def test_slurm_runs_the_doctor_and_starts_one_elastic_torchrun_per_node(tmp_path):
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_ID": "41"}
    done = slurm(tmp_path, "run.yaml", "--seed", "7", SLURM_GPUS_ON_NODE="4", **job)
    assert done.returncode == 0, done.stderr
    doctor, start = (line.split("|") for line in done.stdout.splitlines())
    assert doctor[1:5] == ["megatron-rl", "doctor", "--config", "run.yaml"]
    assert "--resume" not in start
    assert {
        "--nnodes=2",
        "--nproc-per-node=4",
        "--rdzv-backend=c10d",
        "--rdzv-id=41",
        "--rdzv-endpoint=node-7:29500",
        "--max-restarts=3",
        "--seed",
    } <= set(start)


def test_a_requeued_slurm_job_resumes_and_a_container_is_mounted(tmp_path):
    checkpoints = tmp_path / "out" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest.json").write_text("{}")
    done = slurm(tmp_path, "run.yaml", OUTPUT_DIR="out", IMAGE="megatron_rl.sqsh")
    start = done.stdout.splitlines()[-1]
    assert "--resume" in start and "--container-image=megatron_rl.sqsh" in start


def test_a_failed_step_is_the_jobs_status(tmp_path):
    done = slurm(tmp_path, "run.yaml", DRY_RUN="1")
    assert done.returncode == 0 and done.stdout.startswith("torchrun --nnodes=1")
    (tmp_path / "fails").mkdir()
    script = SLURM.read_text().replace("srun", str(tmp_path / "step"))
    (tmp_path / "step").write_text('#!/bin/bash\n[[ "$*" == *torchrun* ]] && exit 9\nexit 0\n')
    (tmp_path / "step").chmod(0o755)
    (tmp_path / "slurm.sh").write_text(script)
    failed = subprocess.run(["bash", tmp_path / "slurm.sh", "run.yaml"], timeout=60)
    assert failed.returncode == 9


def test_the_kubernetes_objects_are_valid_and_their_numbers_agree():
    subprocess.run(
        [BIN / "kubernetes-validate", "--strict", "--quiet", KUBERNETES], check=True, timeout=120
    )
    service, config, job = yaml.safe_load_all(KUBERNETES.read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    nodes = int(next(e["value"] for e in container["env"] if e["name"] == "NODES"))
    assert nodes == spec["completions"] == spec["parallelism"]
    assert pod["subdomain"] == service["metadata"]["name"]
    roles = yaml.safe_load(config["data"]["run.yaml"])["roles"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert roles["trainer_ranks"] + roles["generator_ranks"] == nodes * gpus
    assert container["resources"]["limits"]["memory"] == f"{roles['host_gib']}Gi"


def test_the_configuration_in_the_kubernetes_example_is_valid(tmp_path):
    from megatron_rl.config import load_config

    _, config, _ = yaml.safe_load_all(KUBERNETES.read_text())
    path = tmp_path / "run.yaml"
    path.write_text(config["data"]["run.yaml"])
    assert load_config(path).roles.world_size == 16


def test_the_compose_file_gives_each_service_gpus_and_shared_memory():
    path = ROOT / "compose.yaml"
    schema = ["--builtin-schema", "vendor.compose-spec"]
    subprocess.run([BIN / "check-jsonschema", *schema, path], check=True, timeout=120)
    services = yaml.safe_load(path.read_text())["services"]
    assert services.keys() == {"doctor", "run"}
    for service in services.values():
        assert service["ipc"] == "host"
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
