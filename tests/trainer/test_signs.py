"""A trainer signs where it goes on: before each batch and each checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl import liveness
from megatron_rl.config import RunConfig
from tests.trainer.test_loop import Orchestrator, run, trained

__all__ = ["run"]  # a fixture


def test_every_step_and_every_checkpoint_is_signed(
    run: tuple[RunConfig, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    signed: list[tuple[str, int | None]] = []
    monkeypatch.setattr(liveness, "sign", lambda state, step=None: signed.append((state, step)))
    trained(run, Orchestrator(last=2, save_at=(1,)))
    training = [("training", step) for step in range(3)]
    assert signed == [*training[:2], ("saving", 1), training[2], ("saving", 2)]
