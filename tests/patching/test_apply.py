"""The patch tool: by hash, idempotent, reversible to the byte, and nothing else changes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.patching import (
    Patch,
    PatchError,
    PatchNeededError,
    State,
    apply,
    load_patches,
    require,
    reverse,
    state_of,
    wheel,
)
from megatron_rl.patching.diff import DiffError, Hunk, apply_hunks, parse
from megatron_rl.patching.manifest import FOLDER
from megatron_rl.patching.required import ASSUME
from tests.patching.overlay import installed, texts

ROOT = Path(__file__).resolve().parents[2]
ALL = load_patches()
PATCHES = [patch for patch in ALL if state_of(patch).state is not State.MENDED]
ADAM = next(p for p in PATCHES if p.name == "megatron-core-torch-adam-checkpoint")
OTHERS = ",".join(p.name for p in ALL if p is not ADAM)
"""Of Megatron and vLLM, whose files are not in the folders that these tests make."""

DIFF = """--- a/pkg/m.py
+++ b/pkg/m.py
@@ -2,3 +2,4 @@
 two
-three
+THREE
+and a half
 four
"""
TEXT = "one\ntwo\nthree\nfour\nfive"


def site_of(patch: Patch, folder: Path, version: str | None = None) -> Path:
    """A site-packages with the wheel's own files, as far as the patch names them."""
    name = patch.distribution.replace("-", "_")
    info = folder / f"{name}-{version or installed(patch)[0].version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {patch.distribution}\n"
        f"Version: {version or installed(patch)[0].version}\n"
    )
    (info / "RECORD").write_text("as upstream shipped it")
    for path, text in texts(patch, patched=False).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode())
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    # -S: without site-packages, since it must work where nothing is installed.
    return subprocess.run(
        [sys.executable, "-S", str(ROOT / "tools" / "apply_patches.py"), *arguments],
        capture_output=True, text=True, timeout=60, cwd=ROOT.parent,
    )  # fmt: skip


def test_a_hunk_is_found_at_another_line_and_applied_backwards():
    hunks = parse(DIFF)["pkg/m.py"]
    new = "one\ntwo\nTHREE\nand a half\nfour\nfive"
    assert apply_hunks(TEXT, hunks) == new
    assert apply_hunks(new, [Hunk.reversed(h) for h in hunks]) == TEXT
    moved = "zero\n" * 30
    assert apply_hunks(moved + TEXT, hunks) == moved + new


@pytest.mark.parametrize("text", ["one\ntwo\n3\nfour\n", "", "two\nthree\nfour"])
def test_a_hunk_whose_lines_are_not_there_is_refused(text):
    with pytest.raises(DiffError, match="not in the file"):
        apply_hunks(text, parse(DIFF)["pkg/m.py"])


@pytest.mark.parametrize("diff", ["@@ -1 +1 @@\n x\n", DIFF + "garbage\n"])
def test_what_is_no_diff_is_refused(diff):
    with pytest.raises(DiffError):
        parse(diff)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_apply_is_idempotent_and_reverse_is_exact_to_the_byte(patch, tmp_path):
    site = site_of(patch, tmp_path)
    before, where = contents(site), [str(site)]
    assert state_of(patch, where).state is State.NEEDED
    assert apply(patch, where)
    after = contents(site)
    assert state_of(patch, where).state is State.APPLIED
    assert not apply(patch, where) and contents(site) == after
    changed = {path for path in before if before[path] != after[path]}
    assert changed == {change.path for change in installed(patch)[1]}
    assert reverse(patch, where) and contents(site) == before
    assert not reverse(patch, where) and contents(site) == before


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: patch.name)
def test_a_patch_has_all_that_a_reader_of_upstream_needs(patch):
    files = parse(patch.diff)
    assert patch.releases and patch.fault and patch.upstream and patch.reproduction.is_file()
    for changes in patch.releases.values():
        assert {c.path for c in changes} == set(files)
        assert all(re.fullmatch("[0-9a-f]{64}", c.before) for c in changes)
    file, _, test = patch.test.partition("::")
    assert f"def {test}(" in (ROOT / file).read_text()
    assert patch.name in (FOLDER / "README.md").read_text()


def test_a_hard_link_into_an_installers_cache_keeps_the_original(tmp_path):
    site = site_of(ADAM, tmp_path / "site")
    path = site / "megatron/core/optimizer/optimizer.py"
    cached = tmp_path / "cache.py"
    os.link(path, cached)
    path.chmod(0o640)
    original = cached.read_bytes()
    apply(ADAM, [str(site)])
    assert cached.read_bytes() == original != path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o640


def test_compiled_code_of_the_old_file_goes_with_it(tmp_path):
    site = site_of(ADAM, tmp_path)
    path = site / "megatron/core/optimizer/optimizer.py"
    compiled = path.parent / "__pycache__" / f"optimizer.{sys.implementation.cache_tag}.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"old")
    apply(ADAM, [str(site)])
    assert not compiled.exists()


def test_an_unknown_release_and_an_unknown_file_are_refused_and_left_alone(tmp_path):
    site = site_of(ADAM, tmp_path / "a", version="0.20.0")
    before = contents(site)
    assert state_of(ADAM, [str(site)]).state is State.UNKNOWN
    with pytest.raises(PatchError, match=r"0\.20\.0 is none of the releases .*0\.19\.2"):
        apply(ADAM, [str(site)])
    assert contents(site) == before

    site = site_of(ADAM, tmp_path / "b")
    with (site / "megatron/core/optimizer/optimizer.py").open("a") as file:
        file.write("# mine\n")
    before = contents(site)
    for turn in (apply, reverse):
        with pytest.raises(PatchError, match=r"optimizer\.py is neither the file of the wheel"):
            turn(ADAM, [str(site)])
    assert contents(site) == before
    (site / "megatron/core/optimizer/optimizer.py").unlink()
    with pytest.raises(PatchError, match="missing"):
        apply(ADAM, [str(site)])
    with pytest.raises(PatchError, match="not installed"):
        apply(ADAM, [str(tmp_path / "nowhere")])


def test_a_build_of_the_same_release_is_known_by_its_files(tmp_path):
    patch = next(p for p in PATCHES if p.name == "vllm-cpu-moe-reload")
    site = site_of(patch, tmp_path, version="0.32.0+cpu")
    assert state_of(patch, [str(site)]).state is State.NEEDED


def test_all_files_of_a_patch_are_replaced_or_none(tmp_path, monkeypatch):
    site = site_of(ADAM, tmp_path)
    before, real, calls = contents(site), wheel._replace, []

    def fails_once(path: Path, content: bytes) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OSError("No space left on device")
        real(path, content)

    monkeypatch.setattr(wheel, "_replace", fails_once)
    with pytest.raises(PatchError, match="No space left on device; no file was changed"):
        apply(ADAM, [str(site)])
    assert contents(site) == before


def test_what_a_killed_run_of_the_tool_left_is_finished_or_taken_back(tmp_path):
    for turn in (apply, reverse):
        site = site_of(ADAM, tmp_path / turn.__name__)
        before = contents(site)
        first = "megatron/core/optimizer/optimizer.py"
        (site / first).write_bytes(texts(ADAM, patched=True)[first].encode())
        status = state_of(ADAM, [str(site)])
        assert status.state is State.NEEDED and "1 of 3 files patched" in status.detail
        assert turn(ADAM, [str(site)])
        assert (contents(site) == before) is (turn is reverse)


def test_the_command_line_says_what_it_did_and_its_exit_status(tmp_path):
    site = str(site_of(ADAM, tmp_path))
    where = ("--site", site)
    assert tool("check", *where).returncode == 2  # the other patch's file is missing here
    assert tool("check", ADAM.name, *where).returncode == 1
    said = tool("apply", ADAM.name, *where)
    assert said.returncode == 0 and f"{ADAM.name}: applied" in said.stdout
    assert "is applied already" in tool("apply", ADAM.name, *where).stdout
    assert tool("check", ADAM.name, *where).returncode == 0
    assert "reversed" in tool("reverse", ADAM.name, *where).stdout
    assert "is not applied already" in tool("reverse", ADAM.name, *where).stdout
    listed = tool("list", *where).stdout
    assert all(patch.name in listed and patch.fault in listed for patch in ALL)
    unknown = tool("apply", "nothing", *where)
    assert unknown.returncode == 2 and ADAM.name in unknown.stderr


def test_a_run_that_needs_a_patch_stops_and_names_the_command(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(site_of(ADAM, tmp_path)))
    monkeypatch.delenv(ASSUME, raising=False)
    with pytest.raises(PatchNeededError) as e:
        require("trainer")
    assert f"{sys.executable} -m megatron_rl.patching apply" in str(e.value)
    assert ADAM.name in str(e.value) and "step count" in str(e.value)
    monkeypatch.setenv(ASSUME, f"{OTHERS}, {ADAM.name}")
    require("trainer")


def test_a_patch_is_not_asked_for_where_other_code_stands_in(tmp_path, monkeypatch):
    site = site_of(ADAM, tmp_path)
    monkeypatch.syspath_prepend(str(site))
    (site / "apex").mkdir()
    (site / "apex" / "__init__.py").touch()
    monkeypatch.setenv(ASSUME, OTHERS)
    require("trainer")


def test_the_train_command_ends_with_the_patchs_command_before_any_rank_starts(tmp_path):
    site = site_of(ADAM, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", "train", "--output_dir", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "-m megatron_rl.patching apply" in done.stderr and "Traceback" not in done.stderr


def test_two_patches_of_one_file_are_refused(tmp_path, monkeypatch):
    from megatron_rl.patching import manifest

    shutil.copytree(FOLDER, tmp_path / "patches")
    toml = tmp_path / "patches" / "patches.toml"
    text = toml.read_text()
    start = text.index("[[patch]]")
    copy = text[start : text.index("[[patch]]", start + 1)].replace("-helpers", "-helpers-2")
    toml.write_text(text + "\n" + copy)
    monkeypatch.setattr(manifest, "FOLDER", tmp_path / "patches")
    with pytest.raises(ValueError, match="both change"):
        manifest.load_patches.__wrapped__()


def test_a_release_in_which_upstream_has_mended_the_fault_is_left_alone(tmp_path):
    patch = next(p for p in ALL if p.name == "megatron-core-expert-gradients")
    assert [patch.is_mended_in(v) for v in ("0.18.2", "0.19.0", "0.19.2+cu13", "0.20.0rc1")] == [
        *(False, True, True, True)
    ]
    info = tmp_path / "megatron_core-0.19.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.19.0\n")
    assert state_of(patch, [str(tmp_path)]).state is State.MENDED
    with pytest.raises(PatchError, match=r"before 0\.19\.0"):
        apply(patch, [str(tmp_path)])
    said = tool("apply", patch.name, "--site", str(tmp_path))
    assert said.returncode == 2 and "before 0.19.0" in said.stderr
