"""Megatron-Core 0.18 and 0.19 on CPU with gloo.

`megatron_rl.compat.install` installs it for this package. For a script that knows nothing of it:

    torchrun --nproc-per-node 2 -m megatron_rl.compat.megatron_cpu pretrain_gpt.py ...

Inert where `torch.cuda.is_available()`. No file is changed: every module of `megatron.core` and
`megatron.training` gets a private view of `torch` whose "cuda" is the CPU (`cpu_torch`), and its
entry of `megatron_workarounds`. Outside of Megatron only `Tensor.cuda`, `Module.cuda` and
`Tensor.record_stream` change, which raise without CUDA anyway.
"""

import importlib
import runpy
import sys
import types
from functools import cache
from pathlib import Path

from packaging.specifiers import SpecifierSet

from megatron_rl.compat.import_hook import after_import, is_within
from megatron_rl.compat.running_code import MEGATRON, code_of
from megatron_rl.compat.upstream import UnsupportedVersionError

PACKAGES = ("megatron.core", "megatron.training")
RELEASES = ">=0.18,<0.20"
"""Releases of megatron-core that the workarounds were written for and tested with."""


@cache
def install() -> None:
    """Let Megatron run on CPU; safe to repeat, and light: torch is imported with Megatron.

    Raises:
        RuntimeError: `megatron.core` was imported before this call, on a machine without CUDA.
        UnsupportedVersionError: (of the import) another release of megatron-core.
    """
    if PACKAGES[0] in sys.modules and not sys.modules["torch"].cuda.is_available():
        raise RuntimeError(
            f"{PACKAGES[0]} was imported before megatron_rl, which makes it run on CPU: import"
            " megatron_rl.trainer or megatron_rl.megatron_plugin first"
        )
    after_import(PACKAGES, _change)


def _change(module: types.ModuleType) -> None:
    import torch

    from megatron_rl.compat.megatron_workarounds import WORKAROUNDS

    if torch.cuda.is_available():
        return
    view = _view(is_within(module.__name__, PACKAGES[1:]))
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = view
    if module.__name__ in WORKAROUNDS:
        WORKAROUNDS[module.__name__][1](module)


@cache
def _view(training: bool) -> types.ModuleType:
    """Return the `torch` of Megatron's modules, after a check of the release."""
    import torch

    from megatron_rl.compat import cpu_torch

    code = code_of(MEGATRON)
    if code is None or not SpecifierSet(RELEASES).contains(code.version, prereleases=True):
        raise UnsupportedVersionError(
            f"{MEGATRON} {code}: on CPU, {MEGATRON} {RELEASES} can run; use one of these, or a"
            " machine with CUDA"
        )
    # Two functions for `cuda`, because torch.compile refuses one object under two names of torch.
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.record_stream = lambda self, stream: None
    return cpu_torch.training_view() if training else cpu_torch.view()


if __name__ == "__main__":
    # By name: this module is `__main__` here, and the package imports another copy of it.
    importlib.import_module("megatron_rl.compat").install()
    importlib.import_module("megatron_rl.compat.megatron_checkpoint").write_in_process()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
