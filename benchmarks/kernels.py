"""Time, peak memory and float64 errors of CISPO over the LM head, all variants interleaved.

    python benchmarks/kernels.py                                   # CPU, V = 131,072 and 32,000
    python benchmarks/kernels.py --device cuda                     # T=16,384 H=5,120 V=202,048
    python benchmarks/kernels.py --out benchmarks/results/kernels_cpu.md

CPU time is process time (all threads, waiting ones excluded), which shared machines change little;
GPU time is measured by events. Peak memory is that above the inputs, outputs included: on CPU the
resident set of a fresh process per variant, on GPU the allocator's peak. Variants whose package is
missing are named and left out. The floor is the three products alone, by the same calls in the same
run.

Every measurement is printed with the time that the rest will take, and `--out` is rewritten after
each. Ctrl-C, SIGTERM or a time-out end the run; the tables hold the measurements until then.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

# Threads that wait must not count as CPU time; read when torch starts its pool.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import benchmarks.kernels_variants as v

FLOOR, OURS, EAGER = "three products alone", "fused", "eager, fp32 logits"
Size = tuple[int, int, int]
ERROR_SIZE: Size = (512, 512, 32000)


@dataclass
class Table:
    """The measurements of one size."""

    size: Size
    device: str
    first: dict[str, float] = field(default_factory=dict)
    """Seconds of the first call of each variant, which warms it up."""
    times: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of the later calls."""
    peaks: dict[str, float] = field(default_factory=dict)
    """MiB."""
    missing: list[str] = field(default_factory=list)

    def best(self) -> dict[str, float]:
        return {name: min(self.times.get(name) or [first]) for name, first in self.first.items()}

    def row(self, name: str) -> str:
        best, times, peaks = self.best(), self.times.get(name), self.peaks
        cells = [
            f"{best[name]:.3f}",
            f"{statistics.median(times):.3f}" if times else "first call",
            f"{best[EAGER] / best[name]:.2f}" if EAGER in best else "",
            f"{best[name] / best[FLOOR]:.3f}" if FLOOR in best else "",
            f"{peaks[name]:.0f}" if name in peaks else "",
            f"{peaks[EAGER] / peaks[name]:.1f}" if {EAGER, name} <= peaks.keys() else "",
        ]
        return f"| {name} | {' | '.join(cells)} |"

    def markdown(self) -> list[str]:
        T, H, V = self.size
        unit = "CPU s" if self.device == "cpu" else "GPU s"
        lines = [f"\n## T={T:,} H={H:,} V={V:,}, bf16 operands\n", machine(self.device), ""]
        lines += [
            f"| variant | {unit} (best) | median | eager / this | this / floor |"
            " peak MiB above inputs | eager / this |",
            "|---|--:|--:|--:|--:|--:|--:|",
        ]
        lines += [self.row(name) for name in self.first]
        lines += ["", *(f"Left out: {reason}" for reason in self.missing)]
        best = self.best()
        if FLOOR in best and OURS in best:
            lines.append(f"\nFused path at {best[FLOOR] / best[OURS]:.1%} of its own floor.")
        return lines


@dataclass
class Report:
    """All tables, the progress, and the file that holds them at any time."""

    device: str
    out: Path | None
    work: float
    """Of all measurements, in units of T * H * V."""
    tables: list[Table] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    done: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    ended_by: str = ""

    def measured(self, text: str, work: float) -> None:
        """Print a measurement and save all of them."""
        self.done += work
        spent = time.perf_counter() - self.started
        left = spent / self.done * max(self.work - self.done, 0.0)
        print(f"{text}   [about {left / 60:.1f} min left]", file=sys.stderr, flush=True)
        self.save()

    def markdown(self) -> str:
        lines = [f"# CISPO over the LM head on {'CPU' if self.device == 'cpu' else 'one GPU'}", ""]
        lines += ["`python benchmarks/kernels.py " + " ".join(sys.argv[1:]) + "`"]
        if self.ended_by:
            lines += ["", f"Ended by {self.ended_by}: measurements are missing."]
        for table in self.tables:
            lines += table.markdown()
        if self.errors:
            T, H, V = ERROR_SIZE
            lines += [f"\n## Errors against float64, T={T} H={H} V={V:,}\n"]
            lines += [
                "| variant | loss, relative | log-prob, largest | hidden gradient, relative |"
            ]
            lines[-1] += " weight gradient, relative | its type |"
            lines += ["|---|--:|--:|--:|--:|---|", *self.errors]
        return "\n".join(lines) + "\n"

    def save(self) -> None:
        """Replace the file as a whole."""
        if self.out:
            part = self.out.with_name(self.out.name + ".part")
            part.write_text(self.markdown())
            part.replace(self.out)


def available(device: str, wanted: list[str] | None) -> tuple[dict[str, v.Variant], list[str]]:
    """Return the variants of this device, and why others are missing."""
    variants, missing = {}, []
    other = v.CUDA_ONLY if device == "cpu" else v.CPU_ONLY
    for name, make in v.FACTORIES.items():
        if (wanted and name not in wanted) or name in other:
            continue
        try:
            variants[name] = make()
        except (ImportError, OSError, RuntimeError) as error:
            missing.append(f"{name}: {type(error).__name__}: {error}")
    return variants, missing


def seconds(variant: v.Variant, inputs: v.Inputs, device: str) -> tuple[float, float]:
    """Return CPU or GPU seconds, and the bytes of the peak above the inputs (0 on CPU)."""
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


def peak_of_this_process(name: str, size: Size) -> float:
    """Return the MiB at the peak of one call above the inputs and the rest of a small call."""
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


def peak_in_fresh_process(name: str, size: Size) -> float:
    command = [sys.executable, __file__, "--peak", name]
    done = subprocess.run(
        [*command, "--size", *map(str, size)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"peak memory of {name!r}: {done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure_errors(report: Report, variants: dict[str, v.Variant]) -> None:
    """Add the rows of the error table, against float64 on the same inputs."""
    device = report.device
    d = v.make_inputs(*ERROR_SIZE, device, exact_ratio=True)
    h, w = d.hidden_TH.double(), d.weight_VH.double()
    dw, dh = torch.zeros_like(w), torch.zeros_like(h)
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
    for name, variant in variants.items():
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
        report.errors.append(f"| {name} | {' | '.join(cells)} | {kind} |")
        report.measured(report.errors[-1], work_of(ERROR_SIZE))


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


def work_of(size: Size) -> float:
    return float(size[0] * size[1] * size[2])


def measure(report: Report, table: Table, variants: dict[str, v.Variant], rounds: int) -> None:
    """Fill the table of one size."""
    size, device, work = table.size, table.device, work_of(table.size)
    unit = f"{device.upper()} s"
    inputs = v.make_inputs(*size, device, exact_ratio=False)
    for name in list(variants):  # warms up compilers, libraries, caches
        try:
            table.first[name], peak = seconds(variants[name], inputs, device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            table.missing.append(f"{name}: {type(error).__name__}: {str(error)[:150]}")
            del variants[name]
            report.work -= (rounds + 1) * work
            continue
        if device == "cuda":
            table.peaks[name] = peak / 2**20
        report.measured(f"{name}: {table.first[name]:.3f} {unit}, first call", work)
    for number in range(rounds):
        for name, variant in variants.items():
            spent = seconds(variant, inputs, device)[0]
            table.times.setdefault(name, []).append(spent)
            report.measured(f"{name}: {spent:.3f} {unit}, round {number + 1} of {rounds}", work)
    del inputs
    for name in variants if device == "cpu" else ():
        table.peaks[name] = peak_in_fresh_process(name, size)
        report.measured(table.row(name), work)


def end(number: int, _: object) -> None:
    """Turn a signal into KeyboardInterrupt, with its name."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> None:
    """Measure, print and save."""
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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    default = [(2048, 512, 131072), (2048, 512, 32000)]
    sizes = a.size or (default if a.device == "cpu" else [(16384, 5120, 202048)])
    variants, missing = available(a.device, a.only)
    passes = a.rounds + 2 if a.device == "cpu" else a.rounds + 1
    work = sum(passes * work_of(s) for s in sizes)
    work += 0 if a.no_errors else work_of(ERROR_SIZE)
    report = Report(a.device, a.out, work * len(variants))
    try:
        for size in sizes:
            report.tables.append(Table(tuple(size), a.device, missing=list(missing)))
            measure(report, report.tables[-1], dict(variants), a.rounds)
        if not a.no_errors:
            measure_errors(report, variants)
    except KeyboardInterrupt as error:
        report.ended_by = str(error) or "SIGINT"
    report.save()
    print(report.markdown())
    if report.ended_by:
        sys.exit(128 + signal.Signals[report.ended_by])


if __name__ == "__main__":
    main()
