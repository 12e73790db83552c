"""The Dockerfile without a build of it: its layers, variables and labels, and its steps.

Not tested: NVIDIA's image itself, its torch, and the CUDA kernels that its nvcc compiles.
`docker/standin/build.sh` builds the Dockerfile on a stand-in.
"""

from __future__ import annotations

import re
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.docker.image_files import (
    ROOT,
    attempt,
    context,
    environment,
    instructions,
    lock_blocks,
    pins,
    run,
    steps,
)

SOURCES = ("cellpylib", "pycosat", "zss")
"""Packages of the trainer's lock that are published as source only."""


def position(name: str, part: str) -> int:
    """Return the number of the instruction with this text."""
    (number,) = [i for i, x in enumerate(instructions()) if x.name == name and part in x.text]
    return number


def test_a_changed_python_file_reaches_neither_kernels_nor_packages():
    lines = instructions()
    sources = position("COPY", "megatron_rl megatron_rl")
    assert lines[sources].stage == "wheel"
    # Before it, the kernels' layer has their sources and the builder alone.
    before = [x.text.split()[0] for x in lines[:sources] if x.stage == "wheel" and x.name == "COPY"]
    kernels = {"megatron_rl/kernels/build.py", "megatron_rl/kernels/csrc"}
    assert {p for p in before if p.startswith("megatron_rl")} == kernels
    assert position("RUN", "steps.sh kernels") < sources
    # In the image, only the layer of the wheel depends on it; packages come before that layer.
    wheel = position("COPY", "--from=wheel")
    for step in ("generator", "trainer", "network"):
        assert position("RUN", f"steps.sh {step}") < wheel
    taken = [x.text for x in lines if x.name == "COPY" and "--from" in x.text]
    assert taken == ["--from=wheel /opt/wheels /opt/wheels"]


def test_layers_are_in_the_order_of_their_rate_of_change():
    assert steps() == [
        "tools", "kernels", "wheel", "generator", "nccl", "imports", "trainer", "network",
        "package", "check",
    ]  # fmt: skip
    # A lock is copied by the layer that installs it: another one does not install it again.
    for lock in ("generator", "trainer"):
        copy = position("COPY", f"docker/{lock}.lock")
        assert instructions()[copy + 1].text.partition("steps.sh ")[2].split()[0] == lock


def test_no_sources_stay_in_the_image_but_the_examples():
    copied = [
        source
        for x in instructions()
        if x.name == "COPY" and x.stage in ("", "base") and not x.text.startswith("--from")
        for source in x.text.split()[:-1]
    ]
    assert {c for c in copied if not c.startswith("docker/")} == {"LICENSE", "examples"}


def test_the_builder_gets_what_is_copied_and_nothing_else():
    lines = [x for x in (ROOT / ".dockerignore").read_text().splitlines() if not x.startswith("#")]
    allowed = {x[1:] for x in lines if x.startswith("!")} - {"Dockerfile"}
    copied = {
        source
        for x in instructions()
        if x.name == "COPY" and not x.text.startswith("--from")
        for source in x.text.split()[:-1]
    }
    for source in copied:
        assert any(fnmatch(source, a) or source.startswith(f"{a}/") for a in allowed), source
    for rule in allowed:
        assert any(fnmatch(c, rule) or c.startswith(f"{rule}/") for c in copied), rule


def test_the_image_compiles_kernels_for_ampere_hopper_and_blackwell():
    from megatron_rl.kernels.build import CUDA_ARCHITECTURES

    assert {"80", "90a", "100"} <= set(CUDA_ARCHITECTURES)
    assert "MEGATRON_RL_BUILD_CUDA:-1" in (ROOT / "docker/steps.sh").read_text()


def test_no_path_of_the_image_belongs_to_one_platform():
    for path in ("Dockerfile", "docker/steps.sh"):
        code = re.sub(r"^\s*#.*", "", (ROOT / path).read_text(), flags=re.MULTILINE)
        assert not re.search("x86_64|aarch64|amd64|arm64", code), path


def test_the_images_variables_leave_the_hub_reachable_and_products_in_fp32():
    variables = environment()
    assert variables["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] == "0"
    assert not {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PIP_CONSTRAINT"} & variables.keys()
    # One volume keeps all caches; a user without an entry in /etc/passwd has a home and a name.
    home = variables["HOME"]
    caches = {v for k, v in variables.items() if "CACHE" in k}
    assert len(caches) == 3 and all(c.startswith(f"{home}/.cache/") for c in caches)
    assert variables["USER"]
    assert any(f"-m 1777 {home} {home}/.cache " in x.text for x in instructions())


def test_labels_name_version_commit_licenses_and_base():
    defaults = dict(
        x.text.split("=", 1) for x in instructions() if x.name == "ARG" and "=" in x.text
    )
    assert f'version="{defaults["VERSION"]}"' in (ROOT / "setup.py").read_text()
    assert "REVISION" in defaults
    (labels,) = [x.text for x in instructions() if x.name == "LABEL"]
    for name, value in {
        "version": "${VERSION}",
        "revision": "${REVISION}",
        "base.name": "${NGC_IMAGE}:${NGC_TAG}",
    }.items():
        assert f'org.opencontainers.image.{name}="{value}"' in labels
    assert 'org.opencontainers.image.licenses="Apache-2.0 AND ' in labels
    # They come last: another commit builds no layer again.
    assert instructions()[-1].name == "LABEL"
    assert position("ARG", "REVISION") > position("RUN", "steps.sh package")


def test_the_table_of_base_images_names_the_default_one():
    (tag,) = {x.text.split("=")[1] for x in instructions() if x.text.startswith("NGC_TAG=")}
    page = (ROOT / "docs/install.md").read_text()
    assert f"| **{tag}** |" in page


@pytest.mark.e2e
def test_the_steps_run_in_a_plain_environment(tmp_path):
    # Stand-ins: the trainer's lock for the generators' (vLLM, CUDA), torch of this environment for
    # NVIDIA's. `nccl` and `imports` have tests of their own.
    home = context(tmp_path / "context")
    python, generator = tmp_path / "image/bin/python", tmp_path / "generator"
    run("uv", "venv", "--seed", "--python", sys.executable, python.parents[1])
    base = put_torch(tmp_path / "base")
    site = python.parents[1] / "lib/python3.12/site-packages"
    (site / "base.pth").write_text(f"{base}\n")
    blocks = {block.partition("=")[0]: block for block in lock_blocks("generator")}
    with (home / "docker/trainer.lock").open("a") as file:
        file.write(blocks["numpy"] + "\n")  # NVIDIA's image has it
    # Those that are published as source alone are not in the generators' lock.
    wheels = [b for b in lock_blocks("trainer") if not b.startswith(SOURCES)]
    (home / "docker/generator.lock").write_text("\n".join([*wheels, blocks["numpy"]]) + "\n")
    base_pins = tmp_path / "constraint.txt"
    base_pins.write_text("torch==2.13.0a0+9186a08b2c.nv26.7\nPyYAML==1.2\nabsl_py==0.1\n")
    variables = {
        "PYTHON": str(python),
        "GENERATOR": str(generator),
        "UV_HOME": str(tmp_path / "uv"),
        "WHEELS": str(tmp_path / "wheels"),
        "PIP_CONSTRAINT": str(base_pins),
        "UV_NO_CACHE": "0",
        "UV_COMPILE_BYTECODE": "0",
        "MEGATRON_RL_BUILD_CUDA": "0",
    }
    script = home / "docker/steps.sh"
    for library in (ROOT / "megatron_rl/kernels").glob("*-cpu.so"):  # minutes less of a compiler
        shutil.copy(library, home / "megatron_rl/kernels")
    for step in (s for s in steps() if s not in ("nccl", "imports", "check")):
        run("bash", script, step, where=home, **variables)
    # The sources are next to the script, and are not what is checked.
    (home / "megatron_rl/cli.py").write_text("raise SystemExit('the source tree')\n")
    run("bash", script, "check", where=home, **variables)
    for interpreter in (python, generator / "bin/python"):
        place = run(interpreter, "-P", "-c", "import megatron_rl; print(megatron_rl.__file__)")
        assert str(home) not in place and str(ROOT) not in place
    code = "from megatron_rl.compat import megatron_fixes as m; print([f.state() for f in m.FIXES])"
    assert "fixed at import" in run(python, "-P", "-c", code)
    # pip in the image holds what was installed, and what the base pins besides.
    locked = pins("trainer")
    assert set(base_pins.read_text().split()) == {
        "torch==2.13.0a0+9186a08b2c.nv26.7", *(f"{n}=={v}" for n, v in locked.items()),
        f"numpy=={pins('generator')['numpy']}",
    }  # fmt: skip
    # A kernel library that is missing, or another version than the lock's, ends the build.
    for library in site.glob("megatron_rl/kernels/megatron_rl_kernels-*.so"):
        library.unlink()
    (metadata,) = site.glob("nvidia_modelopt-*.dist-info/METADATA")
    older = re.sub(r"(?m)^Version: .*", "Version: 0.43.0", metadata.read_text())
    metadata.unlink()  # a link to uv's cache
    metadata.write_text(older)
    failed = attempt("bash", script, "check", where=home, **variables, CXX="no-such-compiler")
    assert failed.returncode
    assert "not the kernels that were compiled" in failed.stderr
    assert "nvidia-modelopt: 0.43.0, not 0.4" in failed.stderr


def put_torch(folder: Path) -> Path:
    """Link torch and its metadata of this environment into a folder."""
    import torch

    folder.mkdir()
    packages = Path(torch.__file__).parents[1]
    for name in ("torch", "torchgen", "functorch", "nvidia", "triton", "torch-*.dist-info"):
        for path in packages.glob(name):
            (folder / path.name).symlink_to(path)
    return folder
