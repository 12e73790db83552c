"""Megatron-Core 0.18 and 0.19 on CPU with gloo.

    from megatron_rl.compat import megatron_cpu
    megatron_cpu.install()          # before the first `import megatron.core`

or, for a script that knows nothing of this package:

    torchrun --nproc-per-node 2 -m megatron_rl.compat.megatron_cpu pretrain_gpt.py ...

Inert where `torch.cuda.is_available()`. No file is changed: an import hook gives every module of
`megatron.core` and `megatron.training` a private view of `torch` whose "cuda" is the CPU
(`cpu_torch`), and then applies
the mends of `megatron_mends`, each to one module. Outside of `megatron.core` only `Tensor.cuda`,
`Module.cuda` and `Tensor.record_stream` change, which raise without CUDA anyway.

Every mend names the line of upstream that makes it necessary; a test looks for that line, so
that a release which mends it itself is noticed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl.compat import cpu_torch
from megatron_rl.compat.megatron_mends import MENDS

PACKAGE = "megatron.core"
TRAINING = "megatron.training"
VERSIONS = ((0, 18), (0, 19))
"""Release lines that the mends were written for and tested with."""


class _Finder(importlib.abc.MetaPathFinder):
    """Gives modules of Megatron-Core the private view of torch, then applies their mend."""

    def __init__(self) -> None:
        self.views = {PACKAGE: cpu_torch.view(), TRAINING: cpu_torch.training_view()}
        self.mends = {mend.module: mend for mend in MENDS}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        package = next((p for p in self.views if f"{fullname}.".startswith(f"{p}.")), None)
        if package is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            if module.__dict__.get("torch") is torch:
                module.__dict__["torch"] = self.views[package]
            if fullname in self.mends:
                self.mends[fullname].apply(module)

        loader.exec_module = exec_module
        return spec


def _itself(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _module_itself(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _record_stream(self: Any, stream: Any) -> None:
    pass


def installed() -> bool:
    """Whether `install` has taken effect in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Let `megatron.core` run on CPU; does nothing where CUDA is available, or a second time.

    Raises:
        RuntimeError: another release line of Megatron-Core, or it was imported before this call.
    """
    if torch.cuda.is_available() or installed():
        return
    version = importlib.metadata.version("megatron-core")
    if tuple(int(part) for part in version.split(".")[:2]) not in VERSIONS:
        raise RuntimeError(
            f"megatron-core {version} is installed: compat.megatron_cpu mends"
            f" {', '.join(f'{a}.{b}.x' for a, b in VERSIONS)}; install one of them, or run on a"
            " machine with CUDA"
        )
    if PACKAGE in sys.modules:
        raise RuntimeError(
            f"{PACKAGE} was imported before compat.megatron_cpu.install(): call install() first"
        )
    sys.meta_path.insert(0, _Finder())
    # Two functions, because torch.compile refuses one object under two of torch's names.
    torch.Tensor.cuda = _itself
    torch.nn.Module.cuda = _module_itself
    torch.Tensor.record_stream = _record_stream


if __name__ == "__main__":
    # Here this module is `__main__`; what the script imports is another copy of it.
    from megatron_rl.compat import megatron_checkpoint, megatron_cpu

    megatron_cpu.install()
    megatron_checkpoint.write_in_process()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
