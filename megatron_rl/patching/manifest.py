"""What `patches.toml` says: for each fault its diff, and the hashes of the files it changes."""

from __future__ import annotations

import enum
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).with_name("patches")
FORMAT = 1
ROLES = ("trainer", "generator", "pretrain")
"""Who needs a patch: trainer ranks, generators, or a script that calls `megatron.training`."""


class State(enum.Enum):
    """Where an installed wheel stands with a patch."""

    APPLIED = "applied"
    NEEDED = "needed"
    """The wheel is as upstream shipped it (or an interrupted change left it half-way)."""
    UNKNOWN = "unknown"
    """A version that the patch does not list, or a file that is neither before nor after it."""
    MENDED = "mended"
    """A release in which upstream has mended the fault."""
    ABSENT = "not installed"


@dataclass(frozen=True, slots=True)
class Status:
    """A state and, in words, what led to it."""

    state: State
    detail: str


@dataclass(frozen=True, slots=True)
class Change:
    """One file of a wheel, relative to site-packages, and its SHA-256 on both sides."""

    path: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Patch:
    """One upstream fault and its mend."""

    name: str
    distribution: str
    """Name of the wheel in its package index."""
    role: str
    """One of `ROLES`."""
    fault: str
    upstream: str
    test: str
    """Test that shows the fault without the patch, and its absence with it."""
    releases: dict[str, tuple[Change, ...]]
    """Version of the wheel -> the files that the patch changes in it."""
    unless_importable: tuple[str, ...] = ()
    """Packages of which any one makes the patch unnecessary."""
    mended_in: str = ""
    """First release in which upstream has mended the fault; empty while there is none."""

    def is_mended_in(self, version: str) -> bool:
        """Whether a release of the wheel is one in which upstream has mended the fault."""
        return bool(self.mended_in) and _numbers(version) >= _numbers(self.mended_in)

    @property
    def diff(self) -> str:
        """Text of the unified diff; its paths are relative to site-packages, behind `a/`, `b/`."""
        return (FOLDER / f"{self.name}.patch").read_bytes().decode("utf-8")

    @property
    def reproduction(self) -> Path:
        """Script that exits with 1 where the fault is and with 0 where it is not."""
        return FOLDER / "reproduce" / f"{self.name.replace('-', '_')}.py"


def _numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3]]


@cache
def load_patches() -> tuple[Patch, ...]:
    """All patches, in the order of `patches.toml`.

    Raises:
        ValueError: the file is of another format, or two patches change one file.
    """
    table = tomllib.loads((FOLDER / "patches.toml").read_text(encoding="utf-8"))
    if table["format"] != FORMAT:
        raise ValueError(f"patches.toml has format {table['format']}; this program reads {FORMAT}")
    patches = []
    owners: dict[tuple[str, str], str] = {}
    for entry in table["patch"]:
        releases = {
            version: tuple(Change(path, h["before"], h["after"]) for path, h in files.items())
            for version, files in entry.pop("releases").items()
        }
        entry["unless_importable"] = tuple(entry.get("unless_importable", ()))
        patch = Patch(**entry, releases=releases)
        if patch.role not in ROLES:
            raise ValueError(f"patches.toml: {patch.name}: role {patch.role!r} is none of {ROLES}")
        for path in {c.path for changes in releases.values() for c in changes}:
            # Else a file's hash would depend on which of the two is applied.
            other = owners.setdefault((patch.distribution, path), patch.name)
            if other != patch.name:
                raise ValueError(f"patches.toml: {other} and {patch.name} both change {path}")
        patches.append(patch)
    return tuple(patches)
