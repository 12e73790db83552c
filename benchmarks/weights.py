"""How weight versions travel: fan-out to many nodes, and differences of real weights.

    python benchmarks/weights.py fanout [--sizes 1 10 30 100] [--mib 64] [--link 50]
    python benchmarks/weights.py differences [--model FOLDER] [--versions 50]

Real store processes, led by the orchestrator's own logic, on one machine. Results go to
benchmarks/results/weights_*.json, .md and .png; `--note` says how busy the machine was.

`fanout`: every store has a link of 50 MB/s in each direction. A store in the tree is read by two
others at most, so each reader is limited to half of the link, and then no link carries more than
50 MB/s, the trainer's included. The connections are those that UCX chooses (`UCX_TLS`).

`differences`: fp32 master weights, AdamW at learning rate 5e-7, bf16 versions. Masters start at
bf16 values, as of a checkpoint, in the middle of the interval that is rounded to them. With
`--spread` they start anywhere in it, as after thousands of steps: more of them cross its ends. With
`--model`, a Hugging Face folder, the gradients are those of its language-modeling loss on docs/.
Without it, a stand-in: weights N(0, 0.02), random gradients. Some of the stores skip
every tenth version; each version is compared with the trainer's, bit by bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_rl.weights.store import VERSIONS_HELD  # noqa: E402
from tests.weights.fleet import TRAINER, Fleet  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
PROCESS_BYTES = 45e6
"""Private memory of a store process, without its store."""
LEARNING_RATE = 5e-7
WARM_STEPS = 10
"""Optimizer steps before the first version, after which Adam's steps have their usual size."""


def write_result(name: str, result: dict[str, Any], lines: list[str], note: str) -> None:
    """Write a result as JSON and as a page."""
    model = next(
        (
            line.partition(": ")[2]
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    about = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "processor": f"{model}, {os.cpu_count()} cores",
        "UCX_TLS": os.environ.get("UCX_TLS", "not set: UCX's own choice"),
        "date": time.strftime("%Y-%m-%d"),
        "machine": note,
    }
    (RESULTS / f"weights_{name}.json").write_text(json.dumps({**about, **result}, indent=1) + "\n")
    text = "; ".join(f"{key}: {value}" for key, value in about.items() if key != "command")
    page = [lines[0], "", f"`{about['command']}`. {text}.", "", *lines[1:]]
    (RESULTS / f"weights_{name}.md").write_text("\n".join(page) + "\n")
    print("\n".join(page))


# ---------------------------------------------------------------- fan-out


def fan_out(count: int, mib: float, bucket_mib: float, link: float) -> dict[str, float]:
    """Return how a version reached this many stores; link in MB/s."""
    need = (count + 1) * (VERSIONS_HELD * mib * 2**20 + PROCESS_BYTES)
    free = min(psutil.virtual_memory().available, shutil.disk_usage("/dev/shm").free)
    if need > free:
        raise SystemExit(
            f"{count} stores of {mib:g} MiB need {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB of"
            " shared memory are free: take a smaller --mib"
        )
    folder = Path(tempfile.mkdtemp(prefix="weights_", dir="/dev/shm"))
    fleet = Fleet(folder, 1, int(bucket_mib * 2**20), peer_seconds=60, transports=None)
    names = [f"store-{i}" for i in range(count)]
    words = int(bucket_mib * 2**20) // 2

    def tensors(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            f"t{i}": torch.randint(
                -(2**15), 2**15, (words,), generator=generator, dtype=torch.int16
            )
            for i in range(int(mib / bucket_mib))
        }

    try:
        fleet.start_all({TRAINER: 0.0, **dict.fromkeys(names, link * 1e6 / 2)})
        fleet.publish(1, {name: t.view(torch.bfloat16) for name, t in tensors(1).items()})
        fleet.until_taken(names, 600)  # connections and memory are there now
        cpu = cpu_seconds(fleet)
        fleet.taken.clear()
        manifest = fleet.versions.write(
            2, {n: t.view(torch.bfloat16) for n, t in tensors(2).items()}
        )
        fleet.announce(manifest)
        fleet.until_taken(names, 600)
        cpu = cpu_seconds(fleet) - cpu
        assert fleet.differs(names[-1:]) == []
        seconds = sorted(fleet.times[name, 2] for name in names)
        sent: Counter[str] = Counter()
        for name in names:
            sent.update(fleet.bytes_of(name))
        others = [n for source, n in sent.items() if source != TRAINER]
        return {
            "stores": count,
            "copies from the trainer": sent[TRAINER] / manifest.num_bytes,
            "most copies from a store": max(others, default=0) / manifest.num_bytes,
            "first_seconds": seconds[0],
            "median_seconds": statistics.median(seconds),
            "last_seconds": seconds[-1],
            "last / first": seconds[-1] / seconds[0],
            "cpu_seconds_per_store": cpu / (count + 1),
        }
    finally:
        fleet.close()
        shutil.rmtree(folder, ignore_errors=True)


def cpu_seconds(fleet: Fleet) -> float:
    """Return the processor time of all store processes."""
    times = [psutil.Process(p.pid).cpu_times() for p in fleet.processes.values()]
    return sum(t.user + t.system for t in times)


def run_fan_out(arguments: argparse.Namespace) -> None:
    """Measure and draw the fan-out."""
    rows = []
    for count in arguments.sizes:
        rows.append(fan_out(count, arguments.mib, arguments.bucket_mib, arguments.link))
        print(json.dumps(rows[-1]), flush=True)
    draw_fan_out(rows, arguments)
    keys = list(rows[0])
    lines = [
        "# Fan-out of a weight version",
        f"A version of {arguments.mib:g} MiB in buckets of {arguments.bucket_mib:g} MiB to stores"
        f" with links of {arguments.link:g} MB/s each; a reader is limited to half of that, because"
        " two read from each store. Seconds from the announcement until a store has all of it,"
        " checksums compared. Goals: at most two copies from the trainer, and the last store within"
        " twice the time of the first.",
        "",
        "| " + " | ".join(key.replace("_", " ") for key in keys) + " |",
        "|" + "--:|" * len(keys),
        *("| " + " | ".join(f"{row[key]:.3g}" for key in keys) + " |" for row in rows),
        "",
        "![fan-out](weights_fanout.png)",
    ]
    write_result("fanout", {"rows": rows}, lines, arguments.note)


def draw_fan_out(rows: list[dict[str, float]], arguments: argparse.Namespace) -> None:
    """Draw seconds and copies over the number of stores."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    stores = [row["stores"] for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for key, label in (("first_seconds", "first store"), ("last_seconds", "last store")):
        left.plot(stores, [row[key] for row in rows], "o-", label=label)
    alone = [arguments.mib * 2**20 / (arguments.link * 1e6) * max(1, n) for n in stores]
    left.plot(stores, alone, "k:", label="the trainer alone feeds all")
    left.set(xscale="log", yscale="log", xlabel="stores", ylabel="seconds")
    left.legend()
    right.plot(stores, [row["copies from the trainer"] for row in rows], "o-")
    right.axhline(2, color="k", linestyle=":")
    right.set(xscale="log", xlabel="stores", ylabel="copies from the trainer", ylim=(0, 2.5))
    figure.savefig(RESULTS / "weights_fanout.png", dpi=110)


# ---------------------------------------------------------------- differences


def spread(master: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a bf16 value moved to anywhere in the interval that is rounded to it."""
    near = master.bfloat16()
    spacing = (torch.nextafter(near.abs(), near.new_tensor(torch.inf)) - near.abs()).float()
    return near.float() + (torch.rand(master.shape, generator=generator) - 0.5) * 0.999 * spacing


def trained(model: Path | None, spread_masters: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the bf16 weights after each optimizer step, from `WARM_STEPS` on."""
    generator = torch.Generator().manual_seed(0)
    if model is None:
        masters = {
            f"layers.{i}": torch.nn.Parameter(
                torch.randn(4, 1024, 1024, generator=generator) * 0.02
            )
            for i in range(16)
        }
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        masters = dict(policy.named_parameters())  # tied ones once
        tokenizer = AutoTokenizer.from_pretrained(model)
        text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    with torch.no_grad():
        for master in masters.values():
            near = master.bfloat16().float()
            master.copy_(spread(master, generator) if spread_masters else near)
    optimizer = torch.optim.AdamW(
        masters.values(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.01
    )
    for step in itertools.count():
        if step >= WARM_STEPS:
            yield {name: p.detach().bfloat16() for name, p in masters.items()}
        optimizer.zero_grad()
        if model is None:
            for master in masters.values():
                master.grad = torch.randn(master.shape, generator=generator)
        else:
            start = 128 * step % (len(ids) - 128)
            batch = ids[start : start + 128].view(1, -1)
            policy(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()


def run_differences(arguments: argparse.Namespace) -> None:
    """Measure the bytes of differences, and compare every version bit by bit."""
    names, skipping = [f"store-{i}" for i in range(4)], {"store-1", "store-3"}
    folder = Path(tempfile.mkdtemp(prefix="weights_", dir="/dev/shm"))
    fleet = Fleet(folder, 1, 16 * 2**20, peer_seconds=60, transports=None)
    ratios, chained, seconds = [], [], []
    try:
        fleet.start_all({TRAINER: 0.0, **dict.fromkeys(names, 0.0)})
        for version, tensors in zip(
            range(1, arguments.versions + 2),
            trained(arguments.model, arguments.spread),
            strict=False,
        ):
            takers = fleet.publish_skipping(version, tensors, skipping)
            manifest = fleet.manifest
            fleet.until_taken(takers, 300)
            wrong = fleet.differs(takers)
            assert wrong == [], wrong
            for name in takers if version > 1 else ():
                size = sum(fleet.bytes_of(name).values())
                behind = name in skipping and version % 10 == 1
                (chained if behind else ratios).append(manifest.num_bytes / size)
                seconds.append(fleet.taken[name, version].seconds)
            print(f"version {version}: {min(ratios or [1]):.1f} times fewer bytes", flush=True)
        assert fleet.failed == []
    finally:
        fleet.close()
        shutil.rmtree(folder, ignore_errors=True)
    result = {
        "model": str(arguments.model.name) if arguments.model else "stand-in, N(0, 0.02)",
        "masters": "spread over their bf16 intervals" if arguments.spread else "a bf16 checkpoint",
        "model_bytes": manifest.num_bytes,
        "versions": arguments.versions,
        "times_fewer": {
            "median": statistics.median(ratios),
            "least": min(ratios),
            "after a skipped version": statistics.median(chained),
        },
        "seconds_median": statistics.median(seconds),
        "bit_exact": True,  # else an assertion has failed above
    }
    fewer = result["times_fewer"]
    lines = [
        "# Differences of weight versions",
        f"{result['model']}, {manifest.num_bytes / 1e6:.0f} MB in bf16; fp32 master weights, at"
        f" first {result['masters']}; AdamW"
        f" at learning rate {LEARNING_RATE:g}: {arguments.versions} versions to {len(names)}"
        f" stores, {len(skipping)} of which skip every tenth. All versions are bit-exact.",
        "",
        "| bytes of a version by those of its difference | |",
        "|---|--:|",
        f"| median | {fewer['median']:.0f} |",
        f"| least | {fewer['least']:.0f} |",
        f"| two differences, after a skipped version | {fewer['after a skipped version']:.0f} |",
    ]
    name = "differences_spread" if arguments.spread else "differences"
    write_result(name, result, lines, arguments.note)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(required=True)
    fan = parts.add_parser("fanout")
    fan.add_argument("--sizes", type=int, nargs="+", default=[1, 10, 30, 100])
    fan.add_argument("--mib", type=float, default=64, help="size of a version")
    fan.add_argument("--bucket-mib", type=float, default=1)
    fan.add_argument("--link", type=float, default=50, help="MB/s")
    fan.set_defaults(run=run_fan_out)
    differences = parts.add_parser("differences")
    differences.add_argument("--model", type=Path, help="Hugging Face folder; else a stand-in")
    differences.add_argument("--spread", action="store_true", help="masters as after long training")
    differences.add_argument("--versions", type=int, default=50)
    differences.set_defaults(run=run_differences)
    for part in (fan, differences):
        part.add_argument("--note", default="quiet", help="how busy the machine was")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
