"""The CUDA kernels' code, run on CPU fibers (cuda_emulation.h), against the torch reference.

Three orders of threads: without one of the kernels' barriers, at least one order gives wrong
numbers. It does not exercise the device: its exponential, its memory model, its speed.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_rl.kernels import cispo_reference
from megatron_rl.kernels.build import SOURCES
from tests.kernels.cases import CAP, cispo_inputs, largest
from tests.kernels.test_rows import bf16_of, strided

HERE = Path(__file__).parent


def compile_emulation(directory: Path, source: Path = SOURCES) -> ctypes.CDLL:
    out = directory / "emulation.so"
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    command += ["-Wno-unknown-pragmas", "-Wno-clobbered"]
    command += [f"-I{folder}" for folder in (source, SOURCES, HERE)]
    command += [str(HERE / "cuda_emulation.cpp"), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(out))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_emulation(tmp_path_factory.mktemp("emulation"))


def close(got: torch.Tensor, want: torch.Tensor, bf16: bool) -> bool:
    """Compare every element by itself: most gradients are tiny compared with the target's."""
    return torch.allclose(got.float(), want, rtol=1e-2 if bf16 else 2e-5, atol=1e-12)


def pointer(t: torch.Tensor) -> ctypes.c_void_p:
    assert t.stride(-1) == 1
    return ctypes.c_void_p(t.data_ptr())


def rows(x: torch.Tensor, y: torch.Tensor, first: int, columns: int, scale: float) -> list[object]:
    i64 = ctypes.c_int64
    shape = [i64(x.stride(0)), i64(x.shape[1])]
    shard = [i64(first), i64(columns), ctypes.c_float(scale), i64(len(x))]
    return [pointer(x), *shape, pointer(y), *shard]


def cispo(
    library: ctypes.CDLL, x: torch.Tensor, y: torch.Tensor, columns: int, bf16: bool
) -> torch.Tensor:
    loss = cispo_inputs(len(x), torch.full((len(x),), -3.0))
    out = torch.empty(5, len(x))
    inputs = (loss.generator_logprobs_T, loss.advantages_T, loss.weights_T)
    library.emulate_cispo_rows(
        *rows(x, y, 0, columns, 1.25), *map(pointer, inputs), ctypes.c_float(CAP), int(bf16),
        pointer(out),
    )  # fmt: skip
    return out


# 2048 columns are one tile: one, a part, several with a tail; stride 4k (float4) and odd (scalars).
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("V", "columns", "gap"),
    [(7, 7, 0), (7, 6, 1), (1003, 1000, 5), (12292, 12290, 0), (9001, 9001, 2)],
)
def test_cispo_kernel(
    emulated: ctypes.CDLL, V: int, columns: int, gap: int, bf16: bool, order: int
) -> None:
    C = 3
    x = strided(torch.randn(C, V, generator=torch.Generator().manual_seed(0)) * 4, gap)
    y = torch.tensor([0, columns - 1, columns // 2])
    loss = cispo_inputs(C, torch.full((C,), -3.0))
    want_x = strided(x, gap)
    want = cispo_reference.cispo_rows_(want_x, y, 0, columns, 1.25, *loss.of(slice(None)), False)
    emulated.emulate_order(order)
    got = cispo(emulated, x, y, columns, bf16)
    assert largest(got, want) < 1e-5
    assert close(bf16_of(x) if bf16 else x, want_x, bf16)


@pytest.mark.parametrize("bf16", [False, True])
def test_sharded_kernels(emulated: ctypes.CDLL, bf16: bool) -> None:
    C, V, width = 3, 4400, 2204
    whole = torch.randn(C, V, generator=torch.Generator().manual_seed(1)) * 4
    y = torch.tensor([5, 2204, V - 1])
    padded = torch.full((C, 2 * width), 1e6)
    padded[:, :V] = whole
    parts = [padded[:, :width].contiguous(), padded[:, width:].contiguous()]
    columns = [width, V - width]
    loss = cispo_inputs(C, torch.full((C,), -3.0))
    want_x = whole.clone()
    want = cispo_reference.cispo_rows_(want_x, y, 0, V, 1.25, *loss.of(slice(None)), False)
    emulated.emulate_order(2)
    stats = torch.empty(2, 4, C)
    for i in range(2):
        emulated.emulate_row_stats(
            *rows(parts[i], y, i * width, columns[i], 1.25), pointer(stats[i])
        )
    merged, terms = torch.empty(4, C), torch.empty(3, C)
    i64, f32 = ctypes.c_int64, ctypes.c_float
    emulated.emulate_merge_rows(pointer(stats), i64(2), i64(C), f32(1.25), pointer(merged))
    inputs = (loss.generator_logprobs_T, loss.advantages_T, loss.weights_T)
    emulated.emulate_cispo_terms(
        pointer(merged[0]), *map(pointer, inputs), f32(CAP), i64(C), pointer(terms)
    )
    assert largest(merged[:2], want[:2]) < 1e-5
    assert largest(terms, want[2:]) < 1e-5
    statistics = (pointer(merged[2]), pointer(merged[3]), pointer(terms[1]))
    for i in range(2):
        shard = rows(parts[i], y, i * width, columns[i], 1.25)
        emulated.emulate_row_grads(*shard, *statistics, int(bf16))
    got = torch.cat([bf16_of(p) if bf16 else p for p in parts], 1)
    assert close(got[:, :V], want_x, bf16)
    assert (got[:, V:] == 0).all()


@pytest.mark.parametrize(
    "barrier",
    [
        "if (kBf16 && (tile & (tile + 1)) == 0) __syncthreads();",
        "  __syncthreads();\n  return warp",
    ],
)
def test_the_emulation_notices_a_missing_barrier(tmp_path: Path, barrier: str) -> None:
    text = (SOURCES / "rows_cuda.cu").read_text()
    assert text.count(barrier) == 1
    broken = barrier.replace("__syncthreads();", "{}")
    (tmp_path / "rows_cuda.cu").write_text(text.replace(barrier, broken))
    library = compile_emulation(tmp_path, tmp_path)
    C, V = 2, 12288
    y = torch.tensor([3, 9000])
    wrong = 0
    for order in range(3):
        x = torch.randn(C, V, generator=torch.Generator().manual_seed(0)) * 4
        want = x.clone()
        loss = cispo_inputs(C, torch.full((C,), -3.0))
        cispo_reference.cispo_rows_(want, y, 0, V, 1.25, *loss.of(slice(None)), False)
        library.emulate_order(order)
        cispo(library, x, y, V, True)
        wrong += not close(bf16_of(x), want, True)
    assert wrong > 0
