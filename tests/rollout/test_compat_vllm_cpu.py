"""The mend of vLLM's CPU build: needed as long as the first test says so, inert elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from megatron_rl.compat import vllm_cpu

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def unmended(tmp_path_factory) -> dict[str, Any]:
    """What an unmended vLLM holds after a reload: `EXPERTS`, `TIED`."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.rollout.reload_process", str(tmp_path_factory.mktemp("r"))],
        env=os.environ | {vllm_cpu.DISABLE: "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    lines = [line.split(" ", 1) for line in result.stdout.splitlines()]
    found = {line[0]: json.loads(line[1]) for line in lines if line[0] in ("EXPERTS", "TIED")}
    assert len(found) == 2, result.stderr[-4000:]
    return found


@pytest.mark.e2e
def test_without_the_mend_vllm_holds_wrong_expert_weights_after_a_reload(unmended):
    wrong = unmended["EXPERTS"]
    assert wrong, "vLLM reloads experts correctly by itself now: lower compat.vllm_cpu.AFFECTED"
    assert wrong == sorted(
        f"model.layers.{i}.feed_forward.experts.{name}"
        for i in range(3)
        for name in ("down_proj", "gate_up_proj")
    )


@pytest.mark.e2e
def test_without_the_mend_a_tied_head_keeps_the_old_weight_after_a_reload(unmended):
    assert not unmended["TIED"], "vLLM packs tied heads by itself now: drop pack_tied_head_again"


@pytest.mark.parametrize(
    ("version", "cpu", "expected"),
    [
        ("0.32.0", True, True),
        ("0.32.0+cpu", True, True),
        ("0.32.1", True, True),
        ("0.31.0", True, False),
        ("0.33.0", True, False),
        ("0.32.0", False, False),
    ],
)
def test_the_mend_is_for_the_affected_versions_on_cpu_only(monkeypatch, version, cpu, expected):
    import vllm
    from vllm import platforms

    class Platform:
        def is_cpu(self) -> bool:
            return cpu

    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(platforms, "_current_platform", Platform())
    assert vllm_cpu.needed() is expected
