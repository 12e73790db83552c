"""What a run asks before it starts: are the patches applied that its part of the work needs?"""

from __future__ import annotations

import importlib.util
import os
import sys

from megatron_rl.patching.manifest import Patch, State, load_patches
from megatron_rl.patching.wheel import state_of

ASSUME = "MEGATRON_RL_ASSUME_PATCHED"
"""Environment variable: patches, with commas between them, that a fork of upstream has itself."""


class PatchNeededError(RuntimeError):
    """An upstream fault would spoil this run; the message names the command that mends it."""


def is_needed(patch: Patch) -> bool:
    """Whether the faulty code can run here: nothing that is installed stands in for it."""
    assumed = [name.strip() for name in os.environ.get(ASSUME, "").split(",")]
    if patch.name in assumed:
        return False
    return not any(importlib.util.find_spec(name) for name in patch.unless_importable)


def require(*roles: str) -> None:
    """Stop unless every patch of these roles is applied, or is for a wheel that is not installed.

    Raises:
        PatchNeededError: names each patch, its fault, and the command.
    """
    lines: list[str] = []
    command = f"{sys.executable} -m megatron_rl.patching apply"
    for patch in load_patches():
        if patch.role not in roles or not is_needed(patch):
            continue
        status = state_of(patch)
        if status.state is State.NEEDED:
            lines.append(f"{patch.name} is not applied to {status.detail} ({patch.fault})")
        elif status.state is State.UNKNOWN:
            lines.append(
                f"{patch.name}: {status.detail}; where it is mended: {ASSUME}={patch.name}"
            )
    if lines:
        raise PatchNeededError(
            "an upstream fault would spoil this run:\n  "
            + "\n  ".join(lines)
            + f"\napply the patches first: {command}"
        )
