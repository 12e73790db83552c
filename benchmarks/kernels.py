"""Time, peak memory and float64 errors of CISPO over the LM head, all variants interleaved.

    python benchmarks/kernels.py                                   # CPU, V = 131,072 and 32,000
    python benchmarks/kernels.py --device cuda                     # T=16,384 H=5,120 V=202,048
    python benchmarks/kernels.py --out benchmarks/results/kernels_cpu.md

CPU time is process time (all threads, waiting ones excluded), which shared machines change little;
GPU time is measured by events. Peak memory is that above the inputs, outputs included: on CPU the
resident set of a fresh process per variant, on GPU the allocator's peak. Variants whose package is
missing are named and left out. The floor is the three products alone, by the same calls in the same
run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

# Threads that wait must not count as CPU time; read when torch starts its pool.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import benchmarks.kernels_variants as v

FLOOR, OURS, EAGER = "three products alone", "fused", "eager, fp32 logits"


def available(device: str, wanted: list[str] | None) -> tuple[dict[str, v.Variant], list[str]]:
    """Variants of this device, and why others are missing."""
    found, missing = {}, []
    other = v.CUDA_ONLY if device == "cpu" else v.CPU_ONLY
    for name, make in v.FACTORIES.items():
        if (wanted and name not in wanted) or name in other:
            continue
        try:
            found[name] = make()
        except (ImportError, OSError, RuntimeError) as error:
            missing.append(f"{name}: {type(error).__name__}: {error}")
    return found, missing


def seconds(variant: v.Variant, inputs: v.Inputs, device: str) -> tuple[float, float]:
    """(CPU or GPU seconds, bytes at the peak above what was there; 0 on CPU)."""
    gc.collect()
    if device == "cpu":
        start = time.process_time()
        result = variant(inputs)
        spent = time.process_time() - start
        del result
        return spent, 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = variant(inputs)
    end.record()
    torch.cuda.synchronize()
    del result
    return begin.elapsed_time(end) / 1e3, float(torch.cuda.max_memory_allocated() - before)


def status_mib(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def peak_of_this_process(name: str, size: tuple[int, int, int]) -> float:
    """MiB at the peak of one call above inputs and what an earlier small call left."""
    variant = v.FACTORIES[name]()
    T, H, V = size
    small = v.make_inputs(64, H, min(V, 4096), "cpu", exact_ratio=False)
    variant(small)
    if "compile" in name:  # the compiler's own memory is not the program's
        variant(v.make_inputs(T, H, V, "cpu", exact_ratio=False))
    inputs = v.make_inputs(T, H, V, "cpu", exact_ratio=False)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_mib("VmRSS")
    result = variant(inputs)
    peak = status_mib("VmHWM") - before
    del result
    return peak


def peak_in_fresh_process(name: str, size: tuple[int, int, int]) -> float:
    command = [sys.executable, __file__, "--peak", name]
    done = subprocess.run(
        [*command, "--size", *map(str, size)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"peak memory of {name!r}: {done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def errors(found: dict[str, v.Variant], device: str, size: tuple[int, int, int]) -> list[str]:
    """Rows of the error table, against float64 on the same inputs."""
    d = v.make_inputs(*size, device, exact_ratio=True)
    h, w = d.hidden_TH.double(), d.weight_VH.double()
    rows, dw, dh = [], torch.zeros_like(w), torch.zeros_like(h)
    logp = torch.empty(len(h), dtype=torch.float64, device=device)
    scale = (d.weights_T * d.advantages_T).double()
    for i in range(0, len(h), 128):
        part = slice(i, i + 128)
        log_p = torch.log_softmax(h[part] @ w.T, -1)
        logp[part] = log_p.gather(1, d.targets_T[part, None])[:, 0]
        ratio = (logp[part] - d.generator_logprobs_T[part].double()).exp().clamp(max=v.CAP)
        c = -scale[part] * ratio
        g = log_p.exp_().mul_(-c[:, None]).scatter_add_(1, d.targets_T[part, None], c[:, None])
        dh[part] = g @ w
        dw.addmm_(g.T, h[part])
    ratio = (logp - d.generator_logprobs_T.double()).exp().clamp(max=v.CAP)
    loss = -(scale * ratio * logp).sum()
    for name, variant in found.items():
        result = variant(d)
        if result is None:
            continue
        numbers = [
            (abs(result[0].double() - loss) / abs(loss)).item(),
            float("nan") if result[1] is None else (result[1].double() - logp).abs().max().item(),
            ((result[2].double() - dh).norm() / dh.norm()).item(),
            ((result[3].double() - dw).norm() / dw.norm()).item(),
        ]
        cells = [f"{x:.1e}" if x == x else "not returned" for x in numbers]
        kind = str(result[3].dtype).removeprefix("torch.")
        rows.append(f"| {name} | {' | '.join(cells)} | {kind} |")
    return rows


def machine(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    model = platform.processor() or platform.machine()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    load = f"{os.getloadavg()[0]:.0f}"
    return (
        f"{names[0] if names else model}, {torch.get_num_threads()} threads on {os.cpu_count()}"
        f" cores, load {load}, torch {torch.__version__}"
    )


def measure(
    size: tuple[int, int, int], device: str, rounds: int, wanted: list[str] | None
) -> list[str]:
    """The table of one size."""
    found, missing = available(device, wanted)
    inputs = v.make_inputs(*size, device, exact_ratio=False)
    times: dict[str, list[float]] = {name: [] for name in found}
    peaks: dict[str, float] = {}
    for name in list(found):  # warm-up: compilers, libraries, caches
        try:
            _, peak = seconds(found[name], inputs, device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            missing.append(f"{name}: {type(error).__name__}: {str(error)[:150]}")
            del found[name], times[name]
            continue
        peaks[name] = peak / 2**20
    for _ in range(rounds):
        for name, variant in found.items():
            times[name].append(seconds(variant, inputs, device)[0])
    del inputs
    if device == "cpu":
        peaks = {name: peak_in_fresh_process(name, size) for name in found}
    best = {name: min(t) for name, t in times.items()}
    T, H, V = size
    unit = "CPU s" if device == "cpu" else "GPU s"
    lines = [f"\n## T={T:,} H={H:,} V={V:,}, bf16 operands\n", machine(device), ""]
    lines += [
        f"| variant | {unit} (best) | median | eager / this | this / floor |"
        " peak MiB above inputs | eager / this |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, spent in best.items():
        cells = [
            f"{spent:.3f}",
            f"{statistics.median(times[name]):.3f}",
            f"{best[EAGER] / spent:.2f}" if EAGER in best else "",
            f"{spent / best[FLOOR]:.3f}" if FLOOR in best else "",
            f"{peaks[name]:.0f}",
            f"{peaks[EAGER] / peaks[name]:.1f}" if EAGER in peaks else "",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [""] + [f"Left out: {reason}" for reason in missing]
    if FLOOR in best and OURS in best:
        lines.append(f"\nFused path at {best[FLOOR] / best[OURS]:.1%} of its own floor.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", type=int, nargs=3, action="append", metavar=("T", "H", "V"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of torch on CPU")
    parser.add_argument("--only", action="append", metavar="VARIANT", choices=list(v.FACTORIES))
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--out", type=Path, help="write the tables to this Markdown file")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    if a.peak:
        print(json.dumps(peak_of_this_process(a.peak, tuple(a.size[0]))))
        return
    cpu = a.device == "cpu"
    sizes = a.size or (
        [(2048, 512, 131072), (2048, 512, 32000)] if cpu else [(16384, 5120, 202048)]
    )
    text = [f"# CISPO over the LM head on {'CPU' if cpu else 'one GPU'}", ""]
    text += ["`python benchmarks/kernels.py " + " ".join(sys.argv[1:]) + "`"]
    for size in sizes:
        text += measure(tuple(size), a.device, a.rounds, a.only)
        print("\n".join(text[-30:]), file=sys.stderr, flush=True)
    if not a.no_errors:
        small = (512, 512, 32000)
        found, _ = available(a.device, a.only)
        text += ["\n## Errors against float64, T=512 H=512 V=32,000\n"]
        text += ["| variant | loss, relative | log-prob, largest | hidden gradient, relative |"]
        text[-1] += " weight gradient, relative | its type |"
        text += ["|---|--:|--:|--:|--:|---|", *errors(found, a.device, small)]
    output = "\n".join(text) + "\n"
    print(output)
    if a.out:
        a.out.write_text(output)


if __name__ == "__main__":
    main()
