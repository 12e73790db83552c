"""Errors of the fitter, and the import of optional packages."""

from importlib import import_module
from typing import Any


class PointsError(ValueError):
    """The input cannot be fitted; the message names file, line and column, and the remedy."""

    def __init__(
        self,
        problem: str,
        remedy: str,
        *,
        file: str | None = None,
        line: int | None = None,
        column: str | None = None,
    ) -> None:
        parts = (file, f"line {line}" if line else None, f"column '{column}'" if column else None)
        source = ", ".join(part for part in parts if part)
        super().__init__(f"{source}: {problem}. {remedy}" if source else f"{problem}. {remedy}")


class MissingExtra(ImportError):
    """An optional package is not installed; the message names the command that installs it."""


def require(module: str, purpose: str, extra: str | None = None) -> Any:
    """Import a module of an optional package, or raise MissingExtra."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        distribution = "megatron-rl" if extra is None else f"'megatron-rl[{extra}]'"
        remedy = f"pip install {package}, or pip install {distribution}"
        raise MissingExtra(f"{purpose} needs the package '{package}': {remedy}") from error
