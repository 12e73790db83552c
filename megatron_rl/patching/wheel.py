"""Apply and reverse a patch on an installed wheel: all its files or none, known by their hash."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_rl.patching.diff import DiffError, Hunk, apply_hunks, parse
from megatron_rl.patching.manifest import Change, Patch, State, Status


class PatchError(RuntimeError):
    """A patch that cannot be applied or reversed here; nothing was changed."""


def find_distribution(
    name: str, site: Sequence[str] | None = None
) -> importlib.metadata.Distribution | None:
    """The installed wheel of a name, in this interpreter or in the folders `site`."""
    path = sys.path if site is None else list(site)
    return next(iter(importlib.metadata.distributions(name=name, path=path)), None)


def _changes(
    patch: Patch, distribution: importlib.metadata.Distribution
) -> tuple[Change, ...] | None:
    # `0.32.0+cpu` is the release 0.32.0: the files' hashes decide whether it is the same.
    return patch.releases.get(distribution.version.split("+")[0])


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def state_of(patch: Patch, site: Sequence[str] | None = None) -> Status:
    """Where the installed wheel stands with a patch; reads the files that the patch names.

    Args:
        patch: one of `load_patches()`.
        site: site-packages folders to look in, instead of this interpreter's.
    """
    distribution = find_distribution(patch.distribution, site)
    if distribution is None:
        return Status(State.ABSENT, f"{patch.distribution} is not installed")
    wheel = f"{patch.distribution} {distribution.version}"
    if patch.is_mended_in(distribution.version):
        return Status(State.MENDED, f"{wheel}; the fault was there before {patch.mended_in}")
    changes = _changes(patch, distribution)
    if changes is None:
        return Status(
            State.UNKNOWN,
            f"{wheel} is none of the releases that {patch.name} was made for"
            f" ({', '.join(patch.releases)}): {patch.reproduction} shows whether it has the fault",
        )
    applied = 0
    for change in changes:
        path = Path(str(distribution.locate_file(change.path)))
        found = _hash(path) if path.is_file() else "missing"
        if found not in (change.before, change.after):
            return Status(
                State.UNKNOWN,
                f"{path} is neither the file of the wheel of {wheel} nor the patched one"
                f" (SHA-256 {found[:12]}, not {change.before[:12]} or {change.after[:12]}):"
                f" install {wheel} anew",
            )
        applied += found == change.after
    if applied == len(changes):
        return Status(State.APPLIED, wheel)
    half = f", {applied} of {len(changes)} files patched" if applied else ""
    return Status(State.NEEDED, f"{wheel}{half}")


def apply(patch: Patch, site: Sequence[str] | None = None) -> bool:
    """Apply a patch; returns whether anything changed (False: it was applied already).

    Raises:
        PatchError: the wheel is not installed, needs no patch, or is not one that it knows.
    """
    return _turn(patch, site, backwards=False)


def reverse(patch: Patch, site: Sequence[str] | None = None) -> bool:
    """Bring the wheel's own files back, to the byte; returns whether anything changed.

    Raises:
        PatchError: the wheel is not installed, or is not one that the patch knows.
    """
    return _turn(patch, site, backwards=True)


def patched_text(patch: Patch, change: Change, text: str, *, backwards: bool = False) -> str:
    """One file's text on the other side of a patch, compared with the known hash.

    Raises:
        PatchError: the diff does not fit the text, or makes another file than announced.
    """
    hunks = parse(patch.diff).get(change.path, [])
    wanted = change.after
    if backwards:
        hunks, wanted = [Hunk.reversed(h) for h in hunks], change.before
    try:
        new = apply_hunks(text, hunks)
    except DiffError as e:
        raise PatchError(f"{patch.name}: {change.path}: {e}") from None
    if hashlib.sha256(new.encode()).hexdigest() != wanted:
        raise PatchError(f"{patch.name}: {change.path} would not become the file of patches.toml")
    return new


def _turn(patch: Patch, site: Sequence[str] | None, *, backwards: bool) -> bool:
    status = state_of(patch, site)
    distribution = find_distribution(patch.distribution, site)
    if distribution is None or status.state not in (State.APPLIED, State.NEEDED):
        raise PatchError(f"{patch.name}: {status.detail}")
    new: list[tuple[Path, bytes]] = []
    for change in _changes(patch, distribution) or ():
        path = Path(str(distribution.locate_file(change.path)))
        if _hash(path) == (change.before if backwards else change.after):
            continue
        text = path.read_bytes().decode("utf-8")
        new.append((path, patched_text(patch, change, text, backwards=backwards).encode()))
    _replace_all(patch.name, new)
    return bool(new)


def _replace_all(name: str, files: list[tuple[Path, bytes]]) -> None:
    """Replace all files or, if one cannot be, leave all as they were."""
    undo: list[Callable[[], object]] = []
    try:
        for path, content in files:
            old = path.read_bytes()
            _replace(path, content)
            undo.append(lambda path=path, old=old: _replace(path, old))  # type: ignore[misc]
    except OSError as e:
        for step in reversed(undo):
            step()
        raise PatchError(f"{name}: {e}; no file was changed") from e


def _replace(path: Path, content: bytes) -> None:
    # A new file and a rename: an installer may have linked the old one into its cache.
    mode = path.stat().st_mode
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    # Compiled code is taken for current by time and size, and some installers check neither.
    with suppress(NotImplementedError):
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
