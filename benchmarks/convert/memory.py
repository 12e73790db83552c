"""Memory and time of converting a large synthetic mixture of experts, both ways.

    python benchmarks/convert/memory.py [--gb 2] [--folder DIR] [--real-scout]

Writes a Llama-4-like bf16 checkpoint of random bytes, converts it with `megatron-rl convert` in
separate processes, compares the bytes, and writes benchmarks/results/convert_memory.md.
`--real-scout` uses the parameter sizes of Llama-4 Scout (one layer, all experts, the whole
vocabulary: 8.7 GB), which bound the memory of a real conversion.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import processor  # noqa: E402
from megatron_rl.models import architecture, named_config  # noqa: E402
from megatron_rl.models.safetensors_directory import INDEX  # noqa: E402

RESULT = ROOT / "benchmarks/results/convert_memory.md"
MEASURE = """
import sys
from pathlib import Path
from megatron_rl.cli import main
from megatron_rl.commands.convert import to_huggingface, to_megatron
def peak_mib():  # `ru_maxrss` would start with the peak of the parent process
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
before = peak_mib()
try:
    main(sys.argv[1:])
finally:
    print("PEAK", peak_mib(), before)
"""


def config(gigabytes: float, real: bool) -> dict[str, object]:
    """Return the configuration of a Llama-4 text model of about this size in bf16."""
    scout = dict(named_config("llama-4-scout-17b-16e"))
    text = dict(scout.get("text_config", scout)) | {"model_type": "llama4_text"}
    layers, experts = (1, 16) if real else (max(1, round(gigabytes * 4)), 16)
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
    """Write the model with random bytes; return its size."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf))
    meta = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, shape in architecture(hf).shapes().items()
    }
    split = split_torch_state_dict_into_shards(meta, max_shard_size=10**9)
    for file, names in split.filename_to_tensors.items():
        tensors = {}
        for name in names:
            data = bytearray(os.urandom(meta[name].nbytes))
            tensors[name] = torch.frombuffer(data, dtype=torch.bfloat16).view(meta[name].shape)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / INDEX).write_text(json.dumps(index))
    return sum(tensor.nbytes for tensor in meta.values())


def convert(*arguments: object) -> tuple[int, int, float]:
    """Return (peak MiB, MiB after the imports, seconds) of one conversion in a new process."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "convert", *map(str, arguments)],
        capture_output=True, text=True, timeout=3600, check=True, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    peak, imports = map(float, done.stdout.rpartition("PEAK ")[2].split())
    return round(peak), round(imports), time.monotonic() - begin


def measure(folder: Path, gigabytes: float, real: bool) -> list[str]:
    """Convert one model there and back; return rows of the table."""
    what = "Scout's parameter sizes, 1 layer" if real else "16 experts, hidden 2048"
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
        f" worker, files of 1 GB. {date.today()}, {processor()}.\n"
        "Peak resident memory of the whole process (`VmHWM`), and the part of it beyond the"
        " imports. The result was compared byte by byte.\n\n"
        "| model | size | direction | peak | beyond imports | time | rate |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    RESULT.write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
