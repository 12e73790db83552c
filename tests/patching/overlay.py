"""An import path on which files of installed wheels are as before, or after, a patch.

Every folder on the way to such a file is a real one that links to everything else, so that the
installation itself is not touched, and what it is does not matter.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from megatron_rl.patching import Patch
from megatron_rl.patching.manifest import Change
from megatron_rl.patching.wheel import find_distribution, patched_text


def installed(patch: Patch) -> tuple[importlib.metadata.Distribution, tuple[Change, ...]]:
    """The wheel of a patch, and what the patch changes in it."""
    distribution = find_distribution(patch.distribution)
    assert distribution is not None, f"{patch.distribution} is not installed"
    version = distribution.version.split("+")[0]
    assert version in patch.releases, f"{patch.name} knows no {patch.distribution} {version}"
    return distribution, patch.releases[version]


def texts(patch: Patch, *, patched: bool) -> dict[str, str]:
    """Path in site-packages -> text with or without the patch, whatever is installed."""
    import hashlib

    distribution, changes = installed(patch)
    found = {}
    for change in changes:
        text = Path(str(distribution.locate_file(change.path))).read_bytes().decode()
        is_patched = hashlib.sha256(text.encode()).hexdigest() == change.after
        if is_patched != patched:
            text = patched_text(patch, change, text, backwards=is_patched)
        found[change.path] = text
    return found


def overlay(folder: Path, patches: list[Patch], *, patched: bool) -> Path:
    """Make the import path; to stand first in PYTHONPATH."""
    for patch in patches:
        site = Path(str(installed(patch)[0].locate_file("")))
        for name, text in texts(patch, patched=patched).items():
            path = Path(name)
            for parent in reversed(path.parents[:-1]):
                _link_contents(site / parent, folder / parent)
            (folder / path).unlink()
            (folder / path).write_bytes(text.encode())
    return folder


def _link_contents(source: Path, target: Path) -> None:
    if target.is_symlink():
        target.unlink()
    target.mkdir(exist_ok=True)
    for entry in source.iterdir():
        link = target / entry.name
        if entry.name != "__pycache__" and not link.exists():
            link.symlink_to(entry)
