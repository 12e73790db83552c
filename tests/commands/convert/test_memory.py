"""A conversion holds about one output file in memory, however large the checkpoint is.

The full size (2 GB under 1 GB of memory) is `benchmarks/convert/memory.py`; here a tenth of it has
a tenth of the limit, not counting the memory of importing torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.commands.convert import models

ROOT = Path(__file__).parents[3]
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
    print("PEAK", peak_mib() - before)
"""
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 16,
    "vocab_size": 16000,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a mixture of experts of 200 MB in bf16."""
    folder = tmp_path_factory.mktemp("large")
    models.write(folder / "hf", "tiny_scout", torch.bfloat16, files=4, **SIZES)
    assert sum(p.stat().st_size for p in folder.rglob("*.safetensors")) > 190e6
    return folder


def test_memory_stays_far_below_the_size_of_the_checkpoint(large: Path) -> None:
    limit_mib = 95
    for source, target in (("hf", "megatron"), ("megatron", "back")):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                MEASURE,
                "convert",
                str(large / source),
                str(large / target),
                "--part-size=50MB",
                "--max-shard-size=50MB",
            ],
            capture_output=True, text=True, timeout=250, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.rpartition("PEAK ")[2]) < limit_mib, done.stdout
    index = json.loads((large / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 4
