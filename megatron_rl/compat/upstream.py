"""Faults of upstream releases that would spoil a run without an error, fixed at import.

An `UpstreamFix` names the releases whose code was read. In them it changes the modules that have
the faulty text, so a fork that fixed the fault stays as it is. In any other release the fault
cannot be excluded: the import, and before it `check`, stops with `UnsupportedVersionError`.
"""

import importlib.util
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_rl.compat.import_hook import after_import
from megatron_rl.compat.running_code import code_of

ASSUME = "MEGATRON_RL_ASSUME_FIXED"
"""Environment variable: names of fixes, with commas between them, that are not needed here."""


class UnsupportedVersionError(RuntimeError):
    """A release of an upstream package that may have a fault that spoils the run."""


@dataclass(frozen=True, slots=True)
class UpstreamFix:
    """One fault of an upstream package and the change that fixes it."""

    name: str
    package: str
    affected: str  # releases that have the fault (PEP 440)
    fault: str
    changes: Mapping[str, tuple[str, Callable[[ModuleType], None]]]
    """Module -> (the faulty text of its source, function that changes the module)."""
    fixed_in: str = ""  # first release without the fault; empty while there is none
    unless_importable: tuple[str, ...] = ()
    """Packages of which any one keeps the faulty code from running."""

    def state(self, *, has_text: bool = False) -> tuple[bool, str]:
        """Return (True if the modules are to be changed, the reason).

        Code with the faulty text (`has_text`) is not fixed, whatever its release.

        Raises:
            UnsupportedVersionError: the code that an import gets is of an unknown release.
        """
        if (code := code_of(self.package)) is None:
            return False, f"{self.package} is not installed"
        release, version = f"{self.package} {code}", code.version
        if self.name in os.environ.get(ASSUME, "").replace(" ", "").split(","):
            return False, f"{release}: assumed fixed by {ASSUME}"
        if self.fixed_in and not has_text and Version(version) >= Version(self.fixed_in):
            return False, f"{release}: fixed upstream in {self.fixed_in}"
        if any(importlib.util.find_spec(other) for other in self.unless_importable):
            return False, f"{release}: unused with {' or '.join(self.unless_importable)}"
        if not SpecifierSet(self.affected).contains(version, prereleases=True):
            raise UnsupportedVersionError(
                f"{release} may have a fault that would spoil the run, and that is fixed here for"
                f" {self.package} {self.affected} only: {self.fault}. Use one of these"
                f" releases, or, where patches/reproduce/{self.name.replace('-', '_')}.py finds no"
                f" fault, set {ASSUME}={self.name}"
            )
        return True, f"{release}: fixed at import"

    def apply(self, module: ModuleType) -> None:
        """Change one of the modules of `changes` if it has the fault; raises as `state`."""
        evidence, change = self.changes[module.__name__]
        has_text = evidence in inspect.getsource(module)
        if self.state(has_text=has_text)[0] and has_text:
            change(module)


def check(fixes: Iterable[UpstreamFix]) -> None:
    """Check that the releases that are imported are supported, without importing them.

    Raises:
        UnsupportedVersionError: one is not; names release, fault and remedy.
    """
    for fix in fixes:
        fix.state()


def install(fixes: Iterable[UpstreamFix]) -> None:
    """Have the modules of these fixes changed when they are imported; safe to repeat."""
    for fix in fixes:
        after_import(tuple(fix.changes), fix.apply)
