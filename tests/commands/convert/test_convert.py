"""Hugging Face -> Megatron -> Hugging Face keeps every bit; errors name the broken input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.cli import main
from megatron_rl.commands.convert import resumable, to_huggingface, to_megatron
from megatron_rl.commands.convert.cli import size_in_bytes
from megatron_rl.commands.convert.resumable import ConvertError, Output
from megatron_rl.models import CheckpointError
from megatron_rl.models.safetensors_directory import INDEX
from tests.commands.convert import models

ROOT = Path(__file__).parents[3]


def to_distributed(source: Path, target: Path, part_bytes: int = 10**5, workers: int = 1) -> Path:
    return to_megatron.convert(source, Output(target, part_bytes, workers, quiet=True))


def to_hf(
    source: Path,
    target: Path,
    shard_bytes: int = 10**9,
    like: Path | None = None,
    dtype: str | None = None,
) -> Path:
    return to_huggingface.convert(source, Output(target, shard_bytes, quiet=True), like, dtype)


def content(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", models.NAMES)
def test_a_round_trip_keeps_every_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    tensors = models.write(tmp_path / "hf", name, dtype, files=3)
    to_distributed(tmp_path / "hf", tmp_path / "megatron")
    result = to_hf(tmp_path / "megatron", tmp_path / "back", 2 * 10**5)
    assert_same(content(result), tensors)
    index = json.loads((result / INDEX).read_text())
    files = sorted(path.name for path in result.glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.element_size() for t in tensors.values()
    )
    for file in ("config.json", "tokenizer.json"):
        assert (result / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    assert resumable.verify(tmp_path / "megatron") > 5 and resumable.verify(result) > 3


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    tensors = models.write(tmp_path / "hf", "tiny_dense", tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors
    to_distributed(tmp_path / "hf", tmp_path / "megatron")
    assert_same(content(to_hf(tmp_path / "megatron", tmp_path / "back")), tensors)


def test_leftovers_of_other_tools_are_ignored_unless_they_are_another_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = models.write(tmp_path / "hf", "tiny_dense", tie_word_embeddings=True)
    head = tensors["model.embed_tokens.weight"].clone()
    left = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": head}
    save_file({**tensors, **left}, tmp_path / "hf" / "model.safetensors")
    assert main_exits(["convert", str(tmp_path / "hf"), str(tmp_path / "megatron")]) == 0
    assert "2 tensors that the model does not have (lm_head.weight" in capsys.readouterr().out
    assert_same(content(to_hf(tmp_path / "megatron", tmp_path / "back")), tensors)
    head[0, 0] += 1
    save_file({**tensors, **left}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"has another lm_head.weight than model.embed_tokens"
    ):
        to_distributed(tmp_path / "hf", tmp_path / "no")


def test_chunks_of_a_large_tensor_are_reassembled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_megatron, "CHUNK_BYTES", 1000)  # 3 rows of 64 numbers
    tensors = models.write(tmp_path / "hf", models.MULTIMODAL)
    to_distributed(tmp_path / "hf", tmp_path / "megatron")
    assert_same(content(to_hf(tmp_path / "megatron", tmp_path / "back", 10**5)), tensors)


def test_several_workers_make_the_same_files(tmp_path: Path) -> None:
    models.write(tmp_path / "hf", "tiny_scout", files=2)
    one = to_distributed(tmp_path / "hf", tmp_path / "one")
    two = to_distributed(tmp_path / "hf", tmp_path / "two", workers=2)
    names = [path.name for path in (one / "release").glob("*.distcp")]
    assert len(names) > 3
    for name in names:
        assert (one / "release" / name).read_bytes() == (two / "release" / name).read_bytes()


def test_the_dtype_of_an_export_can_be_chosen(tmp_path: Path) -> None:
    tensors = models.write(tmp_path / "hf", models.MULTIMODAL)
    to_distributed(tmp_path / "hf", tmp_path / "megatron")
    result = to_hf(tmp_path / "megatron", tmp_path / "back", dtype="bfloat16")
    expected = {n: t if n in models.VISION else t.bfloat16() for n, t in tensors.items()}
    assert_same(content(result), expected)
    config = json.loads((result / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"


KILLED = """
import os, signal, sys
from pathlib import Path
from megatron_rl.commands.convert import resumable, to_huggingface, to_megatron
real, count = resumable.file_sum, 0
def dies(path):  # after the file was written, before its record
    global count
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(path)
resumable.file_sum = dies
source, target = Path(sys.argv[1]), Path(sys.argv[2])
output = resumable.Output(target, 10**5)
if sys.argv[3] == "megatron":
    to_megatron.convert(source, output)
else:
    to_huggingface.convert(source, output)
"""


@pytest.mark.parametrize("direction", ["megatron", "huggingface"])
def test_a_killed_conversion_is_resumed(
    tmp_path: Path, direction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    models.write(tmp_path / "hf", models.MULTIMODAL, files=2)
    source = tmp_path / "hf"
    if direction == "huggingface":
        source = to_distributed(source, tmp_path / "megatron")
    target = tmp_path / "target"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(source), str(target), direction],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    assert not target.exists()
    work = tmp_path / ".target.converting"
    records = [path.stem for path in work.glob("*.pickle")]
    complete = [record.replace("release-", "release/") for record in records]
    before = {name: (work / "tree" / name).stat().st_mtime_ns for name in complete}
    assert len(before) == 2
    size = "100KB"
    sizes = ["--part-size", size] if direction == "megatron" else ["--max-shard-size", size]
    main_exits(["convert", str(source), str(target), *sizes])
    assert "resuming: 2 of" in capsys.readouterr().out
    assert not work.exists()
    assert {name: (target / name).stat().st_mtime_ns for name in complete} == before
    undisturbed = tmp_path / "undisturbed"
    if direction == "megatron":
        to_distributed(source, undisturbed)
    else:
        to_hf(source, undisturbed, 10**5)
    for path in undisturbed.rglob("*"):
        if path.is_file() and path.name not in (".metadata", "SHA256SUMS"):
            assert path.read_bytes() == (target / path.relative_to(undisturbed)).read_bytes()
    assert resumable.verify(target) == resumable.verify(undisturbed)


def main_exits(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as e:
        main(arguments)
    return int(e.value.code or 0)


def test_other_options_or_another_source_are_not_resumed(tmp_path: Path, monkeypatch: Any) -> None:
    models.write(tmp_path / "hf", "tiny_dense")

    def stops(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(to_megatron, "_finish", stops)
        to_distributed(tmp_path / "hf", tmp_path / "target")
    with pytest.raises(ConvertError, match=r"another file_bytes: start it with the same settings"):
        to_distributed(tmp_path / "hf", tmp_path / "target", 10**6)
    (tmp_path / "hf" / "config.json").touch()
    with pytest.raises(ConvertError, match=r"another source"):
        to_distributed(tmp_path / "hf", tmp_path / "target")


def test_two_conversions_to_one_target_are_refused(tmp_path: Path) -> None:
    with (
        resumable._work_folder(tmp_path / "target", {}),
        pytest.raises(ConvertError, match="being converted by another process"),
        resumable._work_folder(tmp_path / "target", {}),
    ):
        pass
    (tmp_path / "there").mkdir()
    with (
        pytest.raises(ConvertError, match="there exists: remove it"),
        resumable._work_folder(tmp_path / "there", {}),
    ):
        pass


def test_checksums_name_what_is_broken_missing_and_new(tmp_path: Path) -> None:
    models.write(tmp_path / "hf", "tiny_dense")
    result = to_distributed(tmp_path / "hf", tmp_path / "target")
    file = result / "release" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    (result / "huggingface" / "tokenizer.json").unlink()
    (result / "new").touch()
    with pytest.raises(
        ConvertError,
        match=r"broken \['release/__0_0.distcp'\], missing \['huggingface/tokenizer.json'\],"
        r" not listed \['new'\]",
    ):
        resumable.verify(result)
    with pytest.raises(ConvertError, match="was not made by a conversion"):
        resumable.verify(tmp_path / "hf")


def test_sums_are_those_of_sha256sum(tmp_path: Path) -> None:
    models.write(tmp_path / "hf", "tiny_dense")
    result = to_distributed(tmp_path / "hf", tmp_path / "target")
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"],
        cwd=result, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            "truncated",
            r"model\.safetensors: not a safetensors file, or truncated \(.*not fully covered",
        ),
        ("no header", r"model\.safetensors: not a safetensors file, or truncated"),
        ("unknown", r"model\.extra is unknown"),
        ("missing", r"model\.norm\.weight is missing"),
        ("shape", r"model\.norm\.weight is \[63\], but config\.json makes it \[64\]"),
        ("formats", r"q_proj\.weight.*have dtypes torch\.bfloat16, torch\.float32"),
        ("layers", r"those of the same parameter in other layers"),
        ("no config", r"config\.json: missing|no \.metadata"),
    ],
)
def test_a_broken_source_is_named(tmp_path: Path, spoil: str, message: str) -> None:
    tensors = models.write(tmp_path / "hf", "tiny_dense")
    path = tmp_path / "hf" / "model.safetensors"
    if spoil == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif spoil == "no header":
        path.write_bytes(b"\xff" * 100)
    elif spoil == "no config":
        (tmp_path / "hf" / "config.json").unlink()
    else:
        norm, q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
        changed = {
            "unknown": {**tensors, "model.extra": torch.zeros(2)},
            "missing": {n: t for n, t in tensors.items() if n != norm},
            "shape": {**tensors, norm: torch.zeros(63)},
            "formats": {**tensors, q: tensors[q].bfloat16()},
            "layers": {
                n: t.bfloat16() if n.startswith("model.layers.1.") else t
                for n, t in tensors.items()
            },
        }[spoil]
        save_file(changed, path)
    with pytest.raises(CheckpointError, match=message):
        to_distributed(tmp_path / "hf", tmp_path / "target")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    models.write(tmp_path / "dense", "tiny_dense")
    models.write(tmp_path / "wider", "tiny_dense", intermediate_size=256)
    models.write(tmp_path / "scout", "tiny_scout")
    models.write(tmp_path / "vision", models.MULTIMODAL)
    converted = to_distributed(tmp_path / "dense", tmp_path / "target")
    with pytest.raises(ConvertError, match=r"linear_fc1.weight is \[3, 384, 64\], but .*512"):
        to_hf(converted, tmp_path / "no", like=tmp_path / "wider")
    with pytest.raises(ConvertError, match=r"no tensor of the names decoder\.layers\."):
        to_hf(converted, tmp_path / "no", like=tmp_path / "scout")
    with pytest.raises(ConvertError, match="no config.json at"):
        to_hf(converted / "release", tmp_path / "no")
    (tmp_path / "vision" / "model.safetensors").unlink()
    with pytest.raises(
        ConvertError, match=r"does not hold the vision_model\., multi_modal_projector\. tensors"
    ):
        to_hf(converted, tmp_path / "no", like=tmp_path / "vision")
    (converted / "release" / ".metadata").write_bytes(b"torn")
    with pytest.raises(ConvertError, match=r"\.metadata: torn or unreadable"):
        to_hf(converted, tmp_path / "no")


def test_the_command_reports_errors_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_exits(["convert", str(tmp_path / "nowhere"), str(tmp_path / "x")]) == 2
    assert "nowhere: no such directory" in capsys.readouterr().err
    assert main_exits(["convert", str(tmp_path)]) == 2
    assert "give a TARGET" in capsys.readouterr().err
    assert main_exits(["convert", str(tmp_path), str(tmp_path / "x"), "--dtype", "int3"]) == 2
    assert main_exits(["convert", str(tmp_path), str(tmp_path / "x")]) == 2
    assert "no .metadata in it" in capsys.readouterr().err
    for text, size in (("5GB", 5 * 10**9), ("1.5 GiB", 3 * 2**29), ("1000", 1000)):
        assert size_in_bytes(text) == size
    for text in ("5TBs", "-1GB", "", "0MB"):
        with pytest.raises(ConvertError, match="is not a size"):
            size_in_bytes(text)


def test_verify_compares_a_directory_with_its_checksums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.write(tmp_path / "hf", "tiny_dense")
    result = to_distributed(tmp_path / "hf", tmp_path / "target")
    assert main_exits(["convert", str(result), "--verify"]) == 0
    assert "files match SHA256SUMS" in " ".join(capsys.readouterr().out.split())
