"""Wheels and editable installs bring the library with them; without a compiler they still install.

The build is setuptools' own, without isolation: what pip and uv add is not exercised.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron_rl.kernels import build

ROOT = Path(__file__).parents[2]
LOAD = "from megatron_rl.kernels.library import load; print(load().path)"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Copy the files of a source distribution."""
    copy = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.ptxas")
    shutil.copytree(ROOT / "megatron_rl", copy / "megatron_rl", ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def make(source: Path, hook: str, **environment: str) -> tuple[Path, str]:
    """Return the wheel of a build hook of PEP 517, and the output of the build."""
    out = source.parent / hook
    out.mkdir()
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env={**os.environ, "MEGATRON_RL_BUILD_CUDA": "0", **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (wheel,) = out.glob("*.whl")
    return wheel, done.stdout


def run(code: str, where: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    chosen = ("MEGATRON_RL_KERNELS", "MEGATRON_RL_CPU_KERNEL")
    variables = {k: v for k, v in os.environ.items() if k not in chosen}
    variables |= {"PYTHONPATH": str(where), "MEGATRON_RL_CACHE": str(where / "cache")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=where,
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_a_wheel_takes_the_library_that_was_built_from_the_same_sources(source: Path) -> None:
    """An image compiles it in a layer of its own, before the Python files are there."""
    built = source / "megatron_rl" / "kernels" / build.library_name(False)
    built.write_text("compiled before")
    built.with_suffix(".ptxas").write_text("report")
    wheel, _ = make(source, "build_wheel", CXX="no-such-compiler")
    with zipfile.ZipFile(wheel) as archive:
        folder = "megatron_rl/kernels"
        assert archive.read(f"{folder}/{built.name}") == b"compiled before"
        assert archive.read(f"{folder}/{built.stem}.ptxas") == b"report"
    assert not wheel.stem.endswith("any")


def test_a_wheel_holds_the_library_which_is_loaded_where_no_compiler_is(
    source: Path, tmp_path: Path
) -> None:
    wheel, _ = make(source, "build_wheel")
    assert wheel.stem.split("-")[2:4] == ["py3", "none"]
    assert not wheel.stem.endswith("any")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    library = site / "megatron_rl" / "kernels" / build.library_name(False)
    assert library.is_file()
    done = run(LOAD, site, CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(library)


def test_without_a_compiler_the_wheel_is_for_all_and_the_reference_is_named(
    source: Path, tmp_path: Path
) -> None:
    wheel, output = make(source, "build_wheel", CXX="no-such-compiler")
    assert wheel.stem.endswith("py3-none-any")
    assert "kernels not built now, but at first use: no C++ compiler" in output
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        assert not [n for n in archive.namelist() if n.endswith(".so")]
        assert [n for n in archive.namelist() if n.endswith("csrc/row_math.h")]
        archive.extractall(site)
    done = run(LOAD, site, CXX="no-such-compiler")
    assert done.stdout.strip() == "None"
    assert "plain torch reference: no C++ compiler" in done.stderr


def test_an_editable_install_has_it_in_the_source_folder_and_drops_old_ones(
    source: Path, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n')
    compiler.chmod(0o755)
    kernels = source / "megatron_rl" / "kernels"
    old = kernels / "megatron_rl_kernels-0123456789abcdef-cpu.so"
    old.touch()
    make(source, "build_editable", CXX=str(compiler))
    assert (kernels / build.library_name(False)).is_file()
    assert not old.exists()


def test_cuda_code_that_is_asked_for_must_be_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setenv("MEGATRON_RL_BUILD_CUDA", "1")
    with pytest.raises(build.BuildError, match="nvcc is not on PATH"):
        build.build_for_install(tmp_path)
    monkeypatch.setenv("MEGATRON_RL_BUILD_CUDA", "yes")
    with pytest.raises(build.BuildError, match="MEGATRON_RL_BUILD_CUDA is 'yes'"):
        build.build_for_install(tmp_path)
    monkeypatch.delenv("MEGATRON_RL_BUILD_CUDA")
    assert not build.wants_cuda()
