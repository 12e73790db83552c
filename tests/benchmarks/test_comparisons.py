"""The comparisons of the first hour judge what they compare; stand-ins take the GPU's place.

Not exercised: Transformer Engine and Liger.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import kernels_variants as v
from benchmarks import te_layouts
from tests.kernels.cases import relative

LIGER = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
CASE = "dense, packed"


@pytest.mark.parametrize(
    ("te_error", "verdict"),
    [(0.03, "ok"), (0.3, "TOO FAR"), (None, "FAILED: ValueError: no cuDNN")],
)
def test_layers_that_are_further_from_fp32_than_rounding_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, te_error: float | None, verdict: str
) -> None:
    def gradient(directory: Path, settings: Any, params: str, use_te: bool) -> Any:
        assert (directory / "model.safetensors").exists()
        if use_te and te_error is None:
            raise ValueError("no cuDNN")
        error = 0.0 if params == "fp32" else te_error if use_te else 0.01
        return te_layouts.Gradient(torch.zeros(3) + error, {"w": torch.ones(2) + error})

    monkeypatch.setattr(te_layouts, "gradient", gradient)
    monkeypatch.setattr(te_layouts, "reason_without_te", lambda: "")
    out = tmp_path / "layers.md"
    monkeypatch.setattr(sys, "argv", ["te_layouts.py", "--case", CASE, "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        te_layouts.main()
    assert ended.value.code == int(verdict != "ok")
    assert out.read_text().rstrip().endswith(f"| {verdict} |")


class SM90:
    """`LigerFusedScaledCrossEntropySM90Function` of liger-kernel 0.8.5."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
        selected_token_ids: Tensor | None = None,
    ) -> Tensor:
        logits = _input.float() @ weight.float().T / temperature
        return torch.nn.functional.cross_entropy(logits, target, reduction="none")


class TP:
    """`LigerFusedLinearScaledCrossEntropyTPFunction` of the same."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        tp_group: Any,
        temperature: float = 1.0,
        ignore_index: int = -100,
        tiles_per_reduce: int = 1,
        return_entropy: bool = False,
    ) -> Tensor:
        assert tp_group == "world"
        return SM90.apply(_input, weight, target, temperature, ignore_index)


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put stand-ins in place of Liger's modules; return the sizes that were configured."""
    sizes: list[Any] = []
    module: Any = ModuleType(LIGER)
    module._load_sm90_function = lambda: SM90
    module._load_native_tp_function = lambda: TP
    module.LigerFusedLinearScaledCrossEntropyTPFunction = TP
    setup: Any = ModuleType("liger_kernel.ops.configure")

    def configure(*, process_groups: Any = None, flsce: Any = None, **_: Any) -> bool:
        assert process_groups[flsce[3]] == "world"
        sizes.append(flsce[:3])
        return True

    setup.configure = configure
    setup.FusedLinearCrossEntropyConfig = lambda T, H, V, group=None: (T, H, V, group)
    package, ops = ModuleType("liger_kernel"), ModuleType("liger_kernel.ops")
    ops.__dict__.update(fused_linear_scaled_cross_entropy=module, configure=setup)
    for name, stand_in in {
        "liger_kernel": package,
        "liger_kernel.ops": ops,
        LIGER: module,
        setup.__name__: setup,
    }.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(v, "_world_of_one", lambda: "world")
    return sizes


@pytest.mark.parametrize(("capability", "configured"), [((9, 0), 0), ((10, 0), 1), ((10, 3), 1)])
def test_ligers_kernels_of_the_card_compute_the_same_loss(
    monkeypatch: pytest.MonkeyPatch, liger: list[Any], capability: tuple[int, int], configured: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    inputs = v.make_inputs(16, 24, 50, "cpu", exact_ratio=True)
    variant = v.FACTORIES["Liger, kernels of the card"]()
    variant(inputs)
    got, want = variant(inputs), v.FACTORIES["eager, fp32 logits"]()(inputs)
    assert got is not None and want is not None
    assert liger == [(16, 24, 50)] * configured
    for a, b in zip(got, want, strict=True):
        assert a is not None and b is not None
        assert relative(a, b) < 1e-2


def test_a_card_for_which_liger_has_no_kernels_is_named(
    monkeypatch: pytest.MonkeyPatch, liger: list[Any]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    with pytest.raises(RuntimeError, match=r"none for compute capability 8\.9"):
        v.FACTORIES["Liger, kernels of the card"]()
