"""Python files of a release: of an installed package, or read out of its wheel in the registry.

A wheel is a zip archive, so single files are read by byte ranges, without its gigabytes of
libraries. Texts are kept in the user's cache: a second run needs no network.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import override

from packaging.version import Version

ROOT = Path(__file__).parents[2]
PLATFORM = "x86_64-manylinux_2_39"
BLOCK_BYTES = 1 << 18
SECONDS = 60.0
Read = Callable[[str], str | None]
"""From a path in site-packages to the text; None if there is no such file."""


class RegistryUnreachableError(RuntimeError):
    """The registry cannot be reached; says why."""


def uv(*arguments: str | Path, text: str | None = None) -> str:
    """Run uv in the checkout and return its output.

    Raises:
        RegistryUnreachableError: no connection.
        AssertionError: another error, with uv's message.
    """
    path = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert path, "uv is missing: it is in the extra `dev`"
    done = subprocess.run(
        [path, *map(str, arguments)],
        input=text, capture_output=True, text=True, timeout=180, check=False, cwd=ROOT,
        env={"UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "1", **os.environ},
    )  # fmt: skip
    if done.returncode and re.search(r"error sending request|Failed to fetch", done.stderr):
        raise RegistryUnreachableError(done.stderr.strip().rpartition("\n")[2].strip())
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_release(package: str, version: str) -> Read:
    """Return the reader of a release; the installed package serves if it is that release."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return Wheel(package, version).read
    if Version(Version(distribution.version).public) != Version(version):
        return Wheel(package, version).read
    return installed(Path(str(distribution.locate_file(""))))


def installed(folder: Path) -> Read:
    """Return the reader of a site-packages folder."""

    def read(path: str) -> str | None:
        file = folder / path
        return file.read_text() if file.is_file() else None

    return read


class Wheel:
    """The files of a wheel in the registry, which is not downloaded."""

    def __init__(self, package: str, version: str) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._requirement = f"{package}=={version}"
        self._cache = Path(home) / "megatron_rl" / "releases" / f"{package}-{version}"

    def read(self, path: str) -> str | None:
        """Return the text of a file, or None.

        Raises:
            RegistryUnreachableError: it is not in the cache, and there is no connection.
        """
        if path not in self._names:
            return None
        file = self._cache / path
        if not file.is_file():
            self._keep(path, self._archive.read(path))
        return file.read_text()

    @cached_property
    def _names(self) -> frozenset[str]:
        file = self._cache / "names.json"
        if not file.is_file():
            self._keep(file.name, json.dumps(self._archive.namelist()).encode())
        return frozenset(json.loads(file.read_text()))

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        lock = uv(
            "pip", "compile", "--quiet", "--no-deps", "--format", "pylock.toml",
            "--python-version", "3.12", "--python-platform", PLATFORM, "-",
            text=self._requirement,
        )  # fmt: skip
        (package,) = tomllib.loads(lock)["packages"]
        url = package["wheels"][0]["url"]
        return zipfile.ZipFile(io.BufferedReader(_Ranges(url), BLOCK_BYTES))

    def _keep(self, path: str, content: bytes) -> None:
        file = self._cache / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(content)
        Path(new.name).replace(file)


class _Ranges(io.RawIOBase):
    """A file behind a URL, read by byte ranges."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        answer = self._request("bytes=0-0")
        self._size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def _request(self, span: str) -> urllib.request.addinfourl:
        request = urllib.request.Request(self._url, headers={"Range": span})
        try:
            answer: urllib.request.addinfourl = urllib.request.urlopen(request, timeout=SECONDS)
        except OSError as e:
            raise RegistryUnreachableError(f"{Path(self._url).name}: {e}") from e
        if answer.status != 206:
            raise RegistryUnreachableError(f"{Path(self._url).name}: no byte ranges are served")
        return answer

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        content = self._request(f"bytes={self._at}-{end - 1}").read()
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
