"""The locks of the image: what they pin, that they resolve, and that the packages fit together."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.docker import lock_wheels
from tests.docker.image_files import (
    BIN,
    LOCKS,
    PIN,
    PLATFORMS,
    ROOT,
    attempt,
    lock_blocks,
    pins,
    run,
)
from tests.install.release_files import RegistryUnreachableError, read_release, uv

FROM_THE_BASE = {"torch", "triton", "transformer-engine", "numpy"}
ONLY_PRE_RELEASES = re.compile(r"cwevals|opentelemetry-(exporter|semantic)-.*")
"""Packages that have no other release."""
CUDA_PYTHON = re.compile(
    r"cuda-(?!toolkit).*|nvidia-cutlass-dsl(?!-libs-cu12).*|numpy|typing-extensions"
)
"""Packages of NVIDIA's Python bindings and compilers, with what they import."""
UNUSED = {"build_backend.py"}
"""Files that two packages left in site-packages, and that nothing imports at run time."""


def test_every_package_is_pinned_by_version_and_hash():
    for name in LOCKS:
        blocks = lock_blocks(name)
        assert blocks and all(PIN.match(b) and "--hash=sha256:" in b for b in blocks), name


def test_the_versions_are_those_that_were_seen_to_work():
    tested = dict(PIN.findall((ROOT / "constraints.txt").read_text()))
    for name in LOCKS:
        assert {n: v for n, v in pins(name).items() if tested.get(n) != v} == {}, name


def test_no_pre_release_is_locked_where_there_is_a_release():
    for name in LOCKS:
        early = {n for n, v in pins(name).items() if Version(v).is_prerelease}
        assert {n for n in early if not ONLY_PRE_RELEASES.fullmatch(n)} == set(), name


def test_the_trainer_takes_torch_from_the_base_and_the_generators_do_not():
    trainer, generator = pins("trainer"), pins("generator")
    assert not FROM_THE_BASE & trainer.keys()
    assert not {n for n in trainer if n.startswith("nvidia-")} - {"nvidia-modelopt", "nvidia-ml-py"}
    # The base's ModelOpt is older than what FP8 weights need: the lock's goes over it.
    assert {"megatron-core", "transformers", "nvidia-modelopt"} <= trainer.keys()
    assert {"vllm", "torch", "nvidia-nccl-cu13"} <= generator.keys()
    assert "megatron-core" not in generator
    assert {"uv", "setuptools"} <= pins("tools").keys()


def test_the_locks_libnccl_is_the_one_that_its_torch_was_built_with():
    """The build compares the base's libnccl with it (docker/steps.sh nccl)."""
    locked = pins("generator")
    try:
        read = read_release("torch", locked["torch"])
        metadata = read(f"torch-{locked['torch']}.dist-info/METADATA")
    except RegistryUnreachableError as e:
        pytest.skip(f"the package registry cannot be reached: {e}")
    assert metadata is not None
    needed = [Requirement(r) for r in re.findall(r"(?m)^Requires-Dist: (.+)$", metadata)]
    (nccl,) = [r for r in needed if r.name == "nvidia-nccl-cu13"]
    assert str(nccl.specifier) == f"=={locked['nvidia-nccl-cu13']}"


@pytest.mark.parametrize("machine", PLATFORMS)
@pytest.mark.parametrize("lock", ["trainer", "generator"])
def test_no_file_of_a_lock_has_two_owners(lock, machine):
    """The later package would overwrite the other's file, which no resolver sees."""
    try:
        locked, sources = lock_wheels.wheels(lock, machine)
        shared = lock_wheels.shared_files(locked)
    except RegistryUnreachableError as e:
        pytest.skip(f"the package registry cannot be reached: {e}")
    assert {w.package for w in locked} | set(sources) == pins(lock).keys()
    assert {path: owners for path, owners in shared.items() if path not in UNUSED} == {}
    if lock == "generator":
        assert sources == []  # docker/steps.sh builds none of them


def test_the_cuda_python_packages_of_the_lock_work_together(tmp_path):
    """No GPU is needed: cuda.bindings, which all of them import, fails at import."""
    chosen = tmp_path / "cuda.lock"
    blocks = [b for b in lock_blocks("generator") if CUDA_PYTHON.fullmatch(b.partition("=")[0])]
    chosen.write_text("\n".join(blocks) + "\n")
    try:
        uv("venv", "--quiet", "--no-project", "--python", BIN / "python", tmp_path / "venv")
        python = tmp_path / "venv/bin/python"
        uv("pip", "install", "--quiet", "--no-deps", "--no-build", "--require-hashes",
           "--python", python, "-r", chosen)  # fmt: skip
    except RegistryUnreachableError as e:
        pytest.skip(f"the package registry cannot be reached: {e}")
    run(python, "-P", "-c", "import cutlass, cuda.core", where=tmp_path)


@pytest.mark.e2e
def test_the_locks_resolve_from_the_registry_for_both_platforms(tmp_path):
    for name in LOCKS:
        shutil.copy(ROOT / "docker" / f"{name}.lock", tmp_path)
    run("bash", "docker/lock.sh", tmp_path)
    for name in LOCKS:
        now, lock = (folder / f"{name}.lock" for folder in (tmp_path, ROOT / "docker"))
        # A release may get more files, and so more hashes, but versions may not change.
        assert PIN.findall(now.read_text()) == PIN.findall(lock.read_text()), (
            f"docker/{name}.lock no longer fits setup.py: run docker/lock.sh"
        )
        for machine in PLATFORMS:
            assert "Would install" in dry_install(lock, machine, tmp_path / "nothing")


def dry_install(lock: Path, machine: str, target: Path) -> str:
    """Resolve a lock's files for a platform, without a download."""
    return run(
        BIN / "uv", "pip", "install", "--dry-run", "--no-deps", "--require-hashes",
        "--python-version", "3.12", "--python-platform", f"{machine}-manylinux_2_39",
        "--target", target, "-r", lock,
    )  # fmt: skip


def test_a_lock_that_differs_between_the_platforms_is_not_written(tmp_path):
    (tmp_path / "uv").write_text(
        "#!/bin/bash\nwhile [[ $1 != --output-file ]]; do case $1 in *-manylinux*) m=$1 ;; esac;"
        ' shift; done\necho "numba==$m" >"$2"\n'
    )
    (tmp_path / "uv").chmod(0o755)
    done = attempt("bash", "docker/lock.sh", tmp_path, UV=str(tmp_path / "uv"))
    assert done.returncode == 1 and "tools.lock cannot serve both platforms" in done.stderr
    assert not list(tmp_path.glob("*.lock"))
