"""The documented installation on GPU nodes has a solution; a dry resolve needs metadata alone."""

from __future__ import annotations

import re

import pytest

from tests.install.release_files import ROOT, RegistryUnreachableError, uv

PIN = re.compile(r"^([a-z0-9._-]+)==(\S+)", re.MULTILINE)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_cuda_extra_resolves_to_the_pinned_versions(machine: str) -> None:
    try:
        solution = uv(
            "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--strip-extras",
            "--python-version", "3.12", "--python-platform", f"{machine}-manylinux_2_39",
            "--constraint", "constraints.txt", "--extra", "cuda", "--extra", "dev", "setup.py",
        )  # fmt: skip
    except RegistryUnreachableError as e:
        pytest.skip(f"the package registry cannot be reached: {e}")
    pins = dict(PIN.findall((ROOT / "constraints.txt").read_text()))
    versions = dict(PIN.findall(solution))
    assert {"torch", "vllm", "megatron-core", "transformer-engine-torch"} <= versions.keys()
    assert {n: v for n, v in versions.items() if pins.get(n) != v} == {}
    # Two packages with the same files; verifiers asks for the other one.
    assert "oss-harmony" in versions and "openai-harmony" not in versions
