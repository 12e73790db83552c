"""Memory and time of converting a large synthetic mixture of experts, both ways.

    python benchmarks/convert/memory.py [--gb 2] [--folder DIR] [--real-scout]

Writes a Llama-4-like bf16 checkpoint of random bytes piece by piece, converts it with
`megatron-rl convert` in processes of their own, compares the bytes, and writes
benchmarks/results/convert_memory.md. `--real-scout` takes the parameter sizes of Llama-4 Scout
(one layer, two experts, the whole vocabulary: 4.9 GB), which bound the memory of a real conversion.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_rl.commands.convert.safetensor import COPY_BYTES, INDEX, Writer, shard_names  # noqa: E402
from megatron_rl.models import architecture, named_config  # noqa: E402

RESULT = ROOT / "benchmarks/results/convert_memory.md"
SAID = re.compile(r"peak memory of this process (\d+) MiB, of which (\d+) MiB")


def config(gigabytes: float, real: bool) -> dict[str, object]:
    """A Llama-4 text model of about this size in bf16."""
    scout = dict(named_config("llama-4-scout-17b-16e"))
    text = dict(scout.get("text_config", scout)) | {"model_type": "llama4_text"}
    layers, experts = (1, 2) if real else (max(1, round(gigabytes * 4)), 16)
    changes: dict[str, object] = {
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "no_rope_layers": [1] * layers,
        "moe_layers": list(range(layers)),
    }
    if not real:
        changes |= {
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "intermediate_size_mlp": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 32000,
        }
    return {k: v for k, v in (text | changes).items() if k != "layer_types"}


def write(folder: Path, hf: dict[str, object]) -> int:
    """Writes the model with random bytes; its size."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf))
    shapes = architecture(hf).shapes()
    sizes = {name: 2 * _elements(shape) for name, shape in shapes.items()}
    files = shard_names(sizes, 10**9)
    for file, names in files.items():
        with Writer(folder / file, {n: ("BF16", shapes[n]) for n in names}) as writer:
            for name in names:
                for offset in range(0, sizes[name], COPY_BYTES):
                    size = min(COPY_BYTES, sizes[name] - offset)
                    writer.write(name, bytearray(os.urandom(size)), offset)
    weight_map = {n: file for file, names in files.items() for n in names}
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(sizes.values())


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product


def convert(*arguments: object) -> tuple[int, int, float]:
    """(peak MiB, MiB after the imports, seconds) of one conversion in a process of its own."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/convert_checkpoint.py"), *map(str, arguments)],
        capture_output=True, text=True, timeout=3600, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = SAID.search(done.stdout)
    assert found is not None, done.stdout
    return int(found[1]), int(found[2]), time.monotonic() - begin


def measure(folder: Path, gigabytes: float, real: bool) -> list[str]:
    """Rows of the table: one model there and back."""
    what = "Scout's parameter sizes, 1 layer, 2 experts" if real else "16 experts, hidden 2048"
    source, there, back = (folder / name for name in ("hf", "megatron", "back"))
    size = write(source, config(gigabytes, real))
    rows = []
    for direction, arguments in (
        ("Hugging Face -> Megatron", (source, there)),
        ("Megatron -> Hugging Face", (there, back, "--max-shard-size", "1GB")),
    ):
        peak, imports, seconds = convert(*arguments)
        rows.append(
            f"| {what} | {size / 1e9:.2f} GB | {direction} | {peak} MiB | {peak - imports} MiB |"
            f" {seconds:.0f} s | {size / 1e6 / seconds:.0f} MB/s |"
        )
        print(rows[-1], flush=True)
    for path in source.glob("*.safetensors"):
        assert filecmp.cmp(path, back / path.name, shallow=False), path
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--real-scout", action="store_true")
    options = parser.parse_args()
    rows = []
    for real in (False, True) if options.real_scout else (False,):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows += measure(Path(folder), options.gb, real)
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir(exist_ok=True)
    head = (
        "# Memory of a conversion\n\n"
        "`python benchmarks/convert/memory.py --real-scout`: bf16 checkpoints of random bytes, one"
        " process, files of 1 GB.\nPeak resident memory of the whole process (`ru_maxrss`), and"
        " what of it came after the imports. Every byte came back.\n\n"
        "| model | size | direction | peak | beyond imports | time | rate |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    RESULT.write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
