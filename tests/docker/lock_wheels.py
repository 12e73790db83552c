"""Files that the packages of a lock install, read from their wheels in the registry.

A wheel's list of files is at its end, so some kilobytes of each are read. Lists are kept in the
user's cache, by the wheel's hash: a second run needs no network.
"""

from __future__ import annotations

import io
import json
import os
import struct
import tempfile
import tomllib
import urllib.request
import zipfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from tests.docker.image_files import ROOT
from tests.install.release_files import RegistryUnreachableError, uv

TAIL_BYTES = 1 << 16
SECONDS = 30.0
PYTHON = (3, 12)


class Wheel(NamedTuple):
    """The file of a package that one platform installs."""

    package: str
    url: str
    bytes: int
    sha256: str


@cache
def tags(machine: str) -> dict[Tag, int]:
    """Return the tags of the image's Python and platform, the best one first."""
    platforms = [f"manylinux_2_{n}_{machine}" for n in range(39, 16, -1)]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    if machine == "x86_64":
        platforms += [f"manylinux_2_{n}_{machine}" for n in range(16, 4, -1)]
        platforms += [f"manylinux2010_{machine}", f"manylinux1_{machine}"]
    ordered = [
        *cpython_tags(PYTHON, platforms=platforms),
        *compatible_tags(PYTHON, "cp312", platforms),
    ]
    return {tag: i for i, tag in enumerate(ordered)}


def wheels(lock: str, machine: str) -> tuple[list[Wheel], list[str]]:
    """Return the wheels of a lock for a platform, and the packages that have none.

    Raises:
        RegistryUnreachableError: no connection.
    """
    text = uv(
        "pip", "compile", "--quiet", "--no-deps", "--format", "pylock.toml",
        "--python-version", "3.12", "--python-platform", f"{machine}-manylinux_2_39",
        ROOT / "docker" / f"{lock}.lock",
    )  # fmt: skip
    chosen, sources, order = [], [], tags(machine)
    for package in tomllib.loads(text)["packages"]:
        fit = {}
        for wheel in package.get("wheels", []):
            ranks = [
                order[t] for t in parse_wheel_filename(Path(wheel["url"]).name)[3] if t in order
            ]
            if ranks:
                fit[min(ranks)] = wheel
        if not fit:
            sources.append(package["name"])
            continue
        best = fit[min(fit)]
        chosen.append(Wheel(package["name"], best["url"], best["size"], best["hashes"]["sha256"]))
    return chosen, sources


def _read(wheel: Wheel, start: int) -> bytes:
    request = urllib.request.Request(
        wheel.url, headers={"Range": f"bytes={start}-{wheel.bytes - 1}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            content: bytes = answer.read()
    except OSError as e:
        raise RegistryUnreachableError(f"{Path(wheel.url).name}: {e}") from e
    if len(content) != wheel.bytes - start:
        raise RegistryUnreachableError(f"{Path(wheel.url).name}: no byte ranges are served")
    return content


def files(wheel: Wheel) -> list[str]:
    """Return the paths that a wheel installs, relative to site-packages.

    Raises:
        RegistryUnreachableError: not in the cache, and there is no connection.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kept = Path(home) / "megatron_rl" / "releases" / "paths" / f"{wheel.sha256}.json"
    if not kept.is_file():
        start = max(wheel.bytes - TAIL_BYTES, 0)
        content = _read(wheel, start)
        end = content.rindex(b"PK\5\6")  # the end record; before it, the list
        (offset,) = struct.unpack("<I", content[end + 16 : end + 20])
        content = content[offset - start :] if offset >= start else _read(wheel, offset)
        listing = zipfile.ZipFile(io.BytesIO(content)).infolist()
        paths = sorted(_installed(i.filename) for i in listing if not i.is_dir())
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as new:
            json.dump(paths, new)
        Path(new.name).replace(kept)
    loaded: list[str] = json.loads(kept.read_text())
    return loaded


def _installed(name: str) -> str:
    """Return the path relative to site-packages; files of `x.data` go elsewhere."""
    folder, _, rest = name.partition("/")
    if not folder.endswith(".data"):
        return name
    scheme, _, path = rest.partition("/")
    return path if scheme in ("purelib", "platlib") else f"<{scheme}>/{path}"


def shared_files(locked: list[Wheel]) -> dict[str, list[str]]:
    """Return each path that several packages install, with the packages."""
    owners: dict[str, list[str]] = defaultdict(list)
    with ThreadPoolExecutor(16) as pool:
        for wheel, paths in zip(locked, pool.map(files, locked), strict=True):
            for path in paths:
                owners[path].append(wheel.package)
    return {path: packages for path, packages in owners.items() if len(packages) > 1}
