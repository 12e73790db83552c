"""Single steps of the image's build (docker/steps.sh), with stand-ins for what the base has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.image_files import ROOT, attempt, context, lock_blocks, pins, run
from tests.install.release_files import RegistryUnreachableError, uv

STEPS = ROOT / "docker/steps.sh"
NEEDED = "2.29.7"
"""The libnccl of the generators' torch in these tests."""


def script(path: Path, text: str) -> Path:
    """Write an executable of bash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_unknown_step_is_rejected():
    done = attempt("bash", STEPS, "fly")
    assert done.returncode == 2 and "unknown step fly" in done.stderr


def test_another_python_than_the_locks_is_rejected(tmp_path):
    python = script(tmp_path / "python", "exit 1")
    done = attempt("bash", STEPS, "tools", PYTHON=str(python))
    assert done.returncode == 1 and "is not Python 3.12" in done.stderr


def libnccl(folder: Path, number: int) -> Path:
    """Compile a library that says this version."""
    source, library = folder / f"nccl{number}.c", folder / f"libnccl-{number}.so"
    source.write_text(f"int ncclGetVersion(int *n) {{ *n = {number}; return 0; }}\n")
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c", source, "-o", library], check=True)
    return library


def test_a_libnccl_older_than_the_generators_torch_needs_ends_the_build(tmp_path):
    generator = tmp_path / "generator"
    library = generator / "lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"
    metadata = tmp_path / f"site/nvidia_nccl_cu13-{NEEDED}.dist-info/METADATA"
    for path in (library, metadata):
        path.parent.mkdir(parents=True)
    library.write_text("the wheel's")
    metadata.write_text(f"Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: {NEEDED}\n")
    script(generator / "bin/python", f'PYTHONPATH="{tmp_path}/site" exec "{sys.executable}" "$@"')
    for number, name in ((22809, "2.28.9"), (22907, NEEDED), (23007, "2.30.7")):
        system = libnccl(tmp_path, number)
        done = attempt("bash", STEPS, "nccl", GENERATOR=str(generator), SYSTEM_NCCL=str(system))
        fits = name != "2.28.9"
        assert (done.returncode == 0) is fits, done.stderr
        assert (library.resolve() == system) is fits
        message = f"is {name}, and the generators' torch needs {NEEDED} or newer: choose a newer"
        assert (message in done.stderr) is not fits
    none = attempt("bash", STEPS, "nccl", SYSTEM_NCCL="/none", GENERATOR=str(generator))
    assert none.returncode == 1 and "no libnccl at /none" in none.stderr


@pytest.mark.parametrize("broken", ["", "torch", "cutlass", "flashinfer"])
def test_packages_of_the_generators_that_break_at_import_end_the_build(tmp_path, broken):
    code = f'[[ "$*" != "-P -c import {broken}" ]]; status=$?; echo "$*"; exit $status'
    script(tmp_path / "bin/python", code)
    done = attempt("bash", STEPS, "imports", GENERATOR=str(tmp_path))
    assert (done.returncode == 0) is (broken == ""), done.stderr
    if broken:
        assert f"cannot import {broken}" in done.stderr
    else:
        assert re.findall("import (.*)", done.stdout) == ["torch", "cutlass", "flashinfer"]


def network(folder: Path, names: str, *, apt: str = "exit 100") -> tuple[int, str, str]:
    """Run the step with a linker that finds the files of a folder; return NCCL's file, too."""
    etc = folder / "etc"
    (etc / "ld.so.conf.d").mkdir(parents=True, exist_ok=True)
    (folder / "found").mkdir(exist_ok=True)
    python = script(folder / "python", f'[[ -e "{folder}/found/${{@: -1}}" ]]')
    script(folder / "bin/apt-get", apt)
    script(folder / "bin/ldconfig", f'cp $(cat "{etc}"/ld.so.conf.d/*)/*.so* "{folder}/found"')
    done = attempt(
        "env", f"PATH={folder}/bin:{os.environ['PATH']}", "bash", STEPS, "network",
        NETWORK=names, PYTHON=str(python), AMAZON=str(folder / "amazon"), ETC=str(etc),
    )  # fmt: skip
    nccl = etc / "nccl.conf"
    return done.returncode, done.stderr, nccl.read_text() if nccl.is_file() else ""


def test_without_a_named_network_nccl_takes_what_it_finds(tmp_path):
    assert network(tmp_path, "") == (0, "", "")
    status, errors, _ = network(tmp_path, "omnipath")
    assert status == 1 and "infiniband and efa are known" in errors


def test_infiniband_is_installed_where_the_base_lacks_it(tmp_path):
    install = f'[[ $1 != install ]] || touch "{tmp_path}"/found/lib{{ibverbs,rdmacm}}.so.1'
    status, errors, _ = network(tmp_path / "none", "infiniband", apt="exit 0")
    assert status == 1 and "no usable libibverbs" in errors
    assert network(tmp_path, "infiniband", apt=install)[0] == 0
    assert network(tmp_path, "infiniband", apt="exit 100")[0] == 0  # not called: they are there


def test_efa_gives_nccl_the_plug_in_of_the_base_or_ends_the_build(tmp_path):
    status, errors, _ = network(tmp_path, "efa")
    assert status == 1 and "no libfabric and NCCL plug-in in" in errors
    for name in ("efa/lib/libfabric.so.1", "ofi-nccl/lib/libnccl-net-ofi.so"):
        path = tmp_path / "amazon" / name
        path.parent.mkdir(parents=True)
        path.touch()
    status, errors, nccl = network(tmp_path, "infiniband efa", apt="exit 100")
    assert status == 100 and nccl == ""
    status, errors, nccl = network(tmp_path, "efa")
    assert status == 0, errors
    assert nccl == f"NCCL_NET_PLUGIN={path}\n"


def test_source_packages_are_built_with_the_locked_tools_alone(tmp_path):
    """Isolated builds would take setuptools from the registry, without a pin or hash."""
    try:
        uv("pip", "compile", "--quiet", "--no-deps", "-", text="zss==1.2.0")
    except RegistryUnreachableError as e:
        pytest.skip(f"the package registry cannot be reached: {e}")
    home = context(tmp_path / "context")
    sources = [b for b in lock_blocks("trainer") if b.startswith(("cellpylib", "pycosat", "zss"))]
    (home / "docker/trainer.lock").write_text("\n".join(sources) + "\n")
    run("uv", "venv", "--seed", "--python", sys.executable, tmp_path / "venv")
    log = run(
        "bash", home / "docker/steps.sh", "tools", "trainer",
        PYTHON=str(tmp_path / "venv/bin/python"), UV_HOME=str(tmp_path / "uv"), RUST_LOG="uv=debug",
    )  # fmt: skip
    for name in ("cellpylib", "pycosat", "zss"):
        assert re.search(rf"Building(?: source distribution)?:? {name}", log), log[-3000:]
    assert "Resolving build requirements" not in log
    assert not re.search("Installing build requirement", log)
    assert pins("tools")["setuptools"]
