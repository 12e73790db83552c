"""A checkpoint of a run on disk: complete with the sums of its files, or no checkpoint.

step_000020/
model/            megatron.core.dist_checkpointing: parameters, optimizer, random state
...               files of the state writer (the orchestrator)
trainer.json      {"format": 2, "step": 20, "layout": {...}, "files": {name: [bytes, xxh3]},
"checksum": of all before}: written last, so its directory is complete
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from megatron_rl.files import damage, replace_file

FORMAT = 2
ABOUT = "trainer.json"
_log = logging.getLogger(__name__)


def complete(
    work: Path, step: int, layout: dict[str, Any], files: dict[str, tuple[int, str]]
) -> None:
    """Write the `trainer.json` of a directory whose files are all there."""
    about = {"format": FORMAT, "step": step, "layout": layout, "files": files}
    replace_file(work / ABOUT, json.dumps(about | {"checksum": _checksum(about)}, indent=1))


def find_complete(directory: Path) -> list[Path]:
    """Return the complete checkpoints below a `checkpoints` folder, newest first."""
    complete = []
    for path in steps(directory):
        if _parsed(path / ABOUT) is None:
            _log.warning("%s is incomplete (no readable %s): skipped", path, ABOUT)
        else:
            complete.append(path)
    return complete


def read_about(path: Path) -> dict[str, Any]:
    """Return the contents of a complete checkpoint's `trainer.json`.

    FileNotFoundError: there is none that can be read. ValueError: it has another format.
    """
    about = _parsed(path / ABOUT)
    if about is None:
        raise FileNotFoundError(
            f"{path} has no readable {ABOUT}: it is no complete checkpoint; name another, or"
            " remove it and resume from the newest"
        )
    if about.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {about.get('format')!r}: this program reads {FORMAT}; use the"
            " release that wrote it"
        )
    return about


def problems(path: Path, names: Iterable[str]) -> list[str]:
    """Return what is wrong with these files of a complete checkpoint, a line for each.

    Raises:
        FileNotFoundError, ValueError: as `read_about`.
    """
    files = read_about(path)["files"]
    return damage(path, {name: files[name] for name in names})


def first_of(lines: list[str]) -> str | None:
    """Return the first of these lines, with the number of the others; None if there is none."""
    more = f", and {len(lines) - 1} more of its files" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else None


def num_bytes(path: Path) -> int:
    """Return the bytes of all files of a complete checkpoint but `trainer.json`."""
    return sum(size for size, _ in read_about(path)["files"].values())


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's directory."""
    return int(path.name.removeprefix("step_"))


def steps(directory: Path) -> list[Path]:
    """Return the directories of steps below a `checkpoints` folder, newest first."""
    named = (p for p in directory.glob("step_*") if p.name.removeprefix("step_").isdigit())
    return sorted((p for p in named if p.is_dir()), key=step_of, reverse=True)


def _checksum(about: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(about, sort_keys=True).encode())


def _parsed(path: Path) -> dict[str, Any] | None:
    """Return the contents of a `trainer.json`; None if it is torn, changed or not there."""
    try:
        about = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if not isinstance(about, dict):
        return None
    digest = about.pop("checksum", None)
    return about if about.get("format") != FORMAT or digest == _checksum(about) else None
