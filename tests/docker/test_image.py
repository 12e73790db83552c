"""The image without a build of it: linters, resolved packages, and the steps that need no GPU.

Not tested: NVIDIA's image itself, its torch, and the CUDA kernels that its nvcc compiles.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LOCKS = ("uv", "trainer", "generator")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
FROM_THE_IMAGE = {"torch", "triton", "transformer-engine", "numpy", "nvidia-modelopt"}


def run(*command: str | Path, seconds: float = 280, **variables: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **variables},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


def steps() -> list[tuple[dict[str, str], list[str]]]:
    """Return (variables, steps) of each RUN line of the Dockerfile with docker/steps.sh."""
    runs = []
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if match := re.match(r"RUN (?:(\w+)=(\S+) )?docker/steps\.sh (.+)", line):
            runs.append(({match[1]: match[2]} if match[1] else {}, match[3].split()))
    return runs


def test_the_dockerfile_and_its_scripts_pass_their_linters():
    run(BIN / "hadolint", "--failure-threshold", "info", "Dockerfile")
    run(BIN / "shellcheck", *sorted((ROOT / "docker").glob("*.sh")))


def test_every_package_is_pinned_by_version_and_hash():
    for name in LOCKS:
        text = (ROOT / "docker" / f"{name}.lock").read_text()
        blocks = re.split(r"\n(?=\S)", text.strip())
        assert blocks and all(PIN.match(b) and "--hash=sha256:" in b for b in blocks), name


def test_the_trainer_takes_torch_from_the_image_and_the_generators_do_not():
    trainer, generator = (
        dict(PIN.findall((ROOT / "docker" / f"{name}.lock").read_text())) for name in LOCKS[1:]
    )
    assert not {n for n in trainer if n in FROM_THE_IMAGE or n.startswith("nvidia-")}
    assert {"megatron-core", "transformers"} <= trainer.keys()
    assert {"vllm", "torch", "nvidia-nccl-cu13"} <= generator.keys()
    assert "megatron-core" not in generator


def test_the_image_compiles_kernels_for_ampere_hopper_and_blackwell():
    from megatron_rl.kernels.build import CUDA_ARCHITECTURES

    assert {"80", "90a", "100"} <= set(CUDA_ARCHITECTURES)
    assert ({"MEGATRON_RL_BUILD_CUDA": "1"}, ["wheel", "package", "check"]) in steps()


@pytest.mark.e2e
def test_the_locks_resolve_from_the_registry_for_the_images_python_and_platform(tmp_path):
    for name in LOCKS:
        shutil.copy(ROOT / "docker" / f"{name}.lock", tmp_path)
    run("bash", "docker/lock.sh", tmp_path)
    for name in LOCKS:
        now, lock = (folder / f"{name}.lock" for folder in (tmp_path, ROOT / "docker"))
        # A release may get more files, and so more hashes, but versions may not change.
        assert PIN.findall(now.read_text()) == PIN.findall(lock.read_text()), (
            f"docker/{name}.lock no longer fits setup.py: run docker/lock.sh"
        )
        output = run(
            BIN / "uv", "pip", "install", "--dry-run", "--no-deps", "--require-hashes",
            "--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39",
            "--target", tmp_path / "nothing", "-r", lock,
        )  # fmt: skip
        assert "Would install" in output


def context(folder: Path) -> Path:
    """Copy the files of the checkout that the Dockerfile copies, and no others."""
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if not line.startswith("COPY "):
            continue
        *sources, target = line.split()[1:]
        for source in sources:
            path = ROOT / source
            if path.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.ptxas")
                shutil.copytree(path, folder / target, symlinks=True, ignore=ignore)
            else:
                (folder / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder / target)
    return folder


@pytest.mark.e2e
def test_the_steps_run_in_a_plain_environment(tmp_path):
    # Stand-ins: the trainer's lock for the generators' (vLLM, CUDA), an empty file for libnccl.
    home = context(tmp_path / "context")
    python = tmp_path / "image" / "bin" / "python"
    run(sys.executable, "-m", "venv", python.parents[1])
    shutil.copy(home / "docker" / "trainer.lock", home / "docker" / "generator.lock")
    for lock in ("trainer", "generator"):
        # Unlike the image, the plain environment has no NumPy.
        numpy = next(
            block
            for block in re.split(r"\n(?=\S)", (ROOT / "docker/generator.lock").read_text())
            if block.startswith("numpy==")
        )
        with (home / "docker" / f"{lock}.lock").open("a") as file:
            file.write(numpy + "\n")
    nccl, generator = tmp_path / "libnccl.so.2", tmp_path / "generator"
    nccl.touch()
    variables = {
        "PYTHON": str(python),
        "GENERATOR": str(generator),
        "UV_HOME": str(tmp_path / "uv"),
        "WHEELS": str(tmp_path / "wheels"),
        "SYSTEM_NCCL": str(nccl),
        "UV_NO_CACHE": "0",
        "MEGATRON_RL_BUILD_CUDA": "0",
    }
    script = home / "docker" / "steps.sh"
    generator_nccl = generator / "lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"
    for step in [name for _, names in steps() for name in names]:
        if step == "nccl":
            generator_nccl.parent.mkdir(parents=True)
            generator_nccl.write_text("another version")
        run("bash", script, step, **variables)
    assert generator_nccl.resolve() == nccl
    for interpreter in (python, generator / "bin" / "python"):
        location = run(interpreter, "-P", "-c", "import megatron_rl; print(megatron_rl.__file__)")
        assert str(tmp_path / "context") not in location and str(ROOT) not in location
    code = "from megatron_rl.compat import megatron_fixes as m; print([f.state() for f in m.FIXES])"
    assert "fixed at import" in run(python, "-P", "-c", code)


def test_an_unknown_step_is_rejected():
    done = subprocess.run(["bash", ROOT / "docker/steps.sh", "fly"], capture_output=True, text=True)
    assert done.returncode == 2 and "unknown step fly" in done.stderr
