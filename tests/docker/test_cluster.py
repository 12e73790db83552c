"""The launch examples for Docker, SLURM and Kubernetes are valid and start the right command.

Their probes are run against ranks that sign as those of a run do.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl import liveness
from megatron_rl.config.sections import Timeouts
from tests.signing_rank import passes, probe, signing

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SLURM = ROOT / "examples" / "cluster" / "slurm.sh"
KUBERNETES = ROOT / "examples" / "cluster" / "kubernetes.yaml"
FLEET_SLURM = ROOT / "examples" / "cluster" / "generators_slurm.sh"
FLEET_KUBERNETES = ROOT / "examples" / "cluster" / "generators_kubernetes.yaml"
COMPOSE = ROOT / "compose.yaml"
IMAGE = (ROOT / "Dockerfile").read_text()
CACHE = "/home/rl/.cache"


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


@pytest.mark.parametrize(("answers", "requeued"), [("1 1 1 1", True), ("1 1 0 1 1", False)])
def test_a_slurm_job_whose_ranks_hang_is_requeued(tmp_path, answers, requeued):
    (tmp_path / "answers").write_text("\n".join(answers.split()))
    for name, text in {
        # The step ends when all answers were given, or after a minute.
        "srun": '[[ "$*" == *doctor* ]] && exit 0\n'
        'if [[ "$*" == *torchrun* ]]; then for i in {1..600}; do\n'
        "  [ -s answers ] || exit 0; sleep 0.1; done; exit 1; fi\n"
        '[[ "$*" == *"megatron-rl alive out" ]] || exit 9\n'
        "read -r answer <answers; sed -i 1d answers; exit $answer",
        "scontrol": 'echo "$@" >>scontrol.log',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", SLURM, "run.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=90,
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
             "ALIVE_SECONDS": "0.2", "OUTPUT_DIR": "out", "SLURM_JOB_ID": "41"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == "requeue 41\n" * requeued


def fleet(folder: Path, srun: str, **variables: str) -> subprocess.Popen[str]:
    """Start the script of the generators with SLURM commands that log their arguments."""
    for name, text in {"srun": srun, "scontrol": ":"}.items():
        (folder / name).write_text(f'#!/bin/bash\necho "{name} $@" >>log\n{text}\n')
        (folder / name).chmod(0o755)
    job = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "7", "SLURM_JOB_ID": "48"}
    job |= {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **variables}
    command = ["bash", FLEET_SLURM, "runs/40"]
    return subprocess.Popen(command, cwd=folder, env=os.environ | job)


@pytest.mark.parametrize(
    ("status", "starts", "requeued"), [(0, "0", False), (75, "0", True), (1, "10", False)]
)
def test_a_generator_of_slurm_is_requeued_after_an_error_under_its_name(
    tmp_path, status, starts, requeued
):
    job = fleet(tmp_path, f"exit {status}", SLURM_RESTART_COUNT=starts)
    assert job.wait(60) == status
    expected = ["srun megatron-rl generate --join runs/40 --name generator-41-7"]
    expected += ["scontrol requeue 48"] * requeued
    assert (tmp_path / "log").read_text().splitlines() == expected


def test_a_generator_of_slurm_gets_the_signal_and_has_time_to_leave(tmp_path):
    leaves = "trap 'sleep 1; echo left >>log; exit 143' TERM\nwhile :; do sleep 0.1; done"
    job = fleet(tmp_path, leaves)
    while not (tmp_path / "log").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 143
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["left"]


def test_the_generators_deployment_is_valid_and_joins_the_run_of_the_job():
    subprocess.run(
        [BIN / "kubernetes-validate", "--strict", "--quiet", FLEET_KUBERNETES], check=True,
        timeout=120,
    )  # fmt: skip
    deployment = yaml.safe_load(FLEET_KUBERNETES.read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,), (trainer_pod, trainer) = pod["containers"], job()
    environment, theirs = ({e["name"]: e["value"] for e in c["env"]} for c in (container, trainer))
    assert environment["RUN"] == theirs["OUTPUT"]
    assert environment["HF_HOME"] == theirs["HF_HOME"]
    for key in ("image", "securityContext"):
        assert container[key] == trainer[key]
    assert pod["securityContext"] == trainer_pod["securityContext"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert {m["mountPath"] for m in container["volumeMounts"]} == {
        m["mountPath"] for m in trainer["volumeMounts"] if m["name"] != "config"
    }
    # It has time to hand over its work, and to end its engine.
    assert pod["terminationGracePeriodSeconds"] >= 2 * Timeouts().shutdown_seconds
    (text,) = container["args"]
    assert text.startswith("exec python3 -m megatron_rl.cli generate --join $RUN --name generator-")


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


def job() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod and its container."""
    *_, spec = yaml.safe_load_all(KUBERNETES.read_text())
    pod = spec["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def test_a_pods_probes_pass_while_its_ranks_train_and_fail_when_they_hang(tmp_path):
    _, container = job()
    startup, live = (
        container[f"{name}Probe"]["exec"]["command"] for name in ("startup", "liveness")
    )
    pods = [{liveness.FOLDER: str(tmp_path / name)} for name in ("trainers", "generators")]
    limit, run = 9.0, tmp_path / "run"
    assert probe(*startup, **pods[0])[0] == 1  # torchrun waits for the other nodes
    with (
        signing(run, limit, "trainer", 0, **pods[0]),
        signing(run, limit, "generator", 8, **pods[1]) as generator,
    ):
        for pod in pods:
            for command in (startup, live):
                passes(*command, **pod)
        generator.send_signal(signal.SIGSTOP)
        time.sleep(limit + 0.5)
        status, text = probe(*live, **pods[1])
        assert status == 1
        assert text.count("\n") == 1
        assert re.match(rf"{run}: generator rank 8: generating at step \d+, \d+ s ago \(", text)
        for part in ("no sign of life since", f"process {generator.pid} (stopped by a signal)",
                     "after 9 s (timeouts.batch_seconds + timeouts.startup_seconds)",
                     f"py-spy dump --pid {generator.pid}"):  # fmt: skip
            assert part in text
        passes(*live, **pods[0])
        generator.send_signal(signal.SIGCONT)
        passes(*live, **pods[1])


def test_a_pod_is_found_before_it_is_ready_and_starts_within_its_probe():
    service, *_ = yaml.safe_load_all(KUBERNETES.read_text())
    pod, container = job()
    # A pod becomes ready with its first sign, after a rendezvous on pod 0.
    assert service["spec"]["publishNotReadyAddresses"]
    assert "readinessProbe" not in container
    (text,) = container["args"]
    doctor, start = (shlex.split(part) for part in text.split(";"))
    assert doctor[:4] == ["python3", "-m", "megatron_rl.cli", "doctor"]
    startup, live = container["startupProbe"], container["livenessProbe"]
    rendezvous = int(re.search(r"join_timeout=(\d+)", text)[1])
    doctors = 300
    assert startup["periodSeconds"] * startup["failureThreshold"] >= rendezvous + doctors
    # Ranks that are gone are restarted after another rendezvous, which liveness must survive.
    limits = [Timeouts().startup_seconds, live["periodSeconds"] * live["failureThreshold"]]
    assert sum(limits) > rendezvous + 60
    assert live["terminationGracePeriodSeconds"] < pod["terminationGracePeriodSeconds"]
    assert start[:2] == ["exec", "torchrun"]


def test_a_pod_may_write_lock_memory_use_rdma_and_keeps_what_it_compiled():
    pod, container = job()
    (user,) = re.findall(r"^USER (\d+)$", IMAGE, re.M)
    context = pod["securityContext"]
    assert {str(context[k]) for k in ("runAsUser", "runAsGroup", "fsGroup")} == {user}
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"
    assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
    assert any(name.startswith("rdma/") for name in container["resources"]["limits"])
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert CACHE in mounts
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_the_examples_data_may_come_from_the_hub_into_a_cache_that_stays():
    _, config, _ = yaml.safe_load_all(KUBERNETES.read_text())
    _, container = job()
    task = yaml.safe_load(config["data"]["run.yaml"])["task"]
    assert task["kind"] == "huggingface"
    environment = {e["name"]: e["value"] for e in container["env"]}
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(environment["HF_HOME"].startswith(f"{mount}/") for mount in mounts)
    switches = {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"}
    assert not switches & environment.keys()
    assert not switches & {*re.findall(r"[A-Z_]+", re.sub("#.*", "", IMAGE))}


def test_the_images_health_is_that_of_the_run_in_it_if_there_is_one(tmp_path):
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", IMAGE, re.M)
    environment = {liveness.FOLDER: str(tmp_path / "node")}
    assert probe(*json.loads(check), **environment)[0] == 0
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "run_0.json").write_text("damaged")
    assert probe(*json.loads(check), **environment)[0] == 1


def test_the_compose_file_gives_each_service_gpus_shared_memory_and_folders_of_its_user():
    schema = ["--builtin-schema", "vendor.compose-spec"]
    subprocess.run([BIN / "check-jsonschema", *schema, COMPOSE], check=True, timeout=120)
    compose = yaml.safe_load(COMPOSE.read_text())
    services = compose["services"]
    assert services.keys() == {"doctor", "run"}
    for service in services.values():
        assert service["ipc"] == "host"
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        # Docker makes a missing folder for root, and the image's user could not write into it.
        assert service["user"].startswith("${RUN_USER:?")
        *binds, cache = service["volumes"]
        assert [bind["bind"] for bind in binds] == [{"create_host_path": False}] * 2
        assert cache.split(":")[1] == CACHE
        assert cache.split(":")[0] in compose["volumes"]
    # A new volume begins as the image's folder, in which every user may write.
    assert f"install -d -m 1777 /home/rl {CACHE}" in IMAGE
