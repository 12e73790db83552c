"""Print what docker/standin/build.sh saw: seconds of every step, sizes of layers, checks inside.

report.py FOLDER KIND COMMIT SECONDS_OF_THE_BASE
"""

import json
import os
import re
import sys
import time
from pathlib import Path

STEP = re.compile(r"(?:\[\d+/\d+\] )?STEP \d+/\d+: (.*)")
CHECK = re.compile(r"^check: (.*): (ok|FAILED with status \d+)(?:,| after) (\d+ s)$", re.MULTILINE)


def steps(log: Path) -> list[tuple[str, int, bool]]:
    """Return (instruction, seconds, from the cache) of every step in the log of a build."""
    starts: list[tuple[str, int, bool]] = []
    for line in log.read_text(errors="replace").splitlines():
        at, _, text = line.partition(" ")
        match = STEP.match(text)
        if match or text == "end" or text.startswith("Successfully tagged"):
            name = match[1] if match else "buildah removes its containers"
            starts.append((name, int(at), False))
        elif starts and text.startswith("--> Using cache"):
            starts[-1] = (*starts[-1][:2], True)
    ends = [at for _, at, _ in starts[1:]]
    return [(name, end - at, hit) for (name, at, hit), end in zip(starts, ends, strict=False)]


def layers(folder: Path) -> list[tuple[str, float]]:
    """Return (made by, GB) of every layer of the image, the base's first."""
    image = json.loads((folder / "image.json").read_text())
    storage = folder / "storage"
    images = json.loads((storage / "overlay-images/images.json").read_text())
    known = {x["id"]: x for x in json.loads((storage / "overlay-layers/layers.json").read_text())}
    top = next(x["layer"] for x in images if x["id"] == image["FromImageID"])
    sizes: list[float] = []
    while top:
        sizes.insert(0, known[top].get("diff-size", 0) / 1e9)
        top = known[top].get("parent", "")
    made_by = [
        h.get("created_by", "") for h in image["OCIv1"]["history"] if not h.get("empty_layer")
    ]
    return list(zip(made_by, sizes, strict=True))


def short(instruction: str) -> str:
    """Return an instruction of the Dockerfile in one cell of a table."""
    text = re.sub(r"^(\|\d )?([A-Z_]+=\S* )*/bin/\S+( -c)?|--mount=\S+ ", "", instruction)
    return text.replace("|", "/")[:90].strip() or "the base"


def processor() -> str:
    """Return the processor's name, and how many cores this process may use."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", text)
    return f"{name[1] if name else os.uname().machine}, {len(os.sched_getaffinity(0))} cores"


def table(head: str, rows: list[str]) -> str:
    """Return a table of Markdown."""
    return "\n".join([head, "|".join(["", *["---"] * (head.count("|") - 1), ""]), *rows, ""])


def main(folder: Path, kind: str, commit: str, base_seconds: str) -> None:
    """Print the result as Markdown."""
    built, again = (steps(folder / name) for name in ("build.log", "rebuild.log"))
    sizes = layers(folder)
    rebuilt = [(name, s) for name, s, hit in again if not hit and s > 2]
    hits = sum(hit for _, _, hit in again)
    print(f"""# The image on a stand-in base: {kind}

`docker/standin/build.sh {kind}`, commit {commit[:12]}, {time.strftime("%Y-%m-%d")}, {processor()},
load {os.getloadavg()[2]:.0f} in the last quarter of an hour.
Base: {base_seconds} s. Build: {sum(s for _, s, _ in built)} s.
Image: {sum(s for _, s in sizes):.2f} GB, of which the base {sizes[0][1]:.2f} GB.
""")
    if kind == "lean":
        lines = Path(__file__).with_name("lean.txt").read_text().splitlines()
        names = [x for x in lines if x and not x.startswith("#")]
        print(f"Left out of the generators' lock: {', '.join(names)}.\n")
    rows = [f"| `{short(n)}` | {'from the cache' if c else s} |" for n, s, c in built if c or s > 2]
    print(table("| step of the build, from 3 s | s |", rows))
    print(table("| layer | GB |", [f"| `{short(n)}` | {s:.3f} |" for n, s in sizes if s >= 5e-4]))
    checks = CHECK.findall((folder / "inside.log").read_text(errors="replace"))
    print(table("| inside the image, as user 10001 | result | |", [
        f"| {name} | {result} | {seconds} |" for name, result, seconds in checks
    ]))  # fmt: skip
    print(
        f"After a change of one Python file: {sum(s for _, s, _ in again)} s; {hits} of"
        f" {len(again)} steps came from the cache. Built again:\n"
    )
    print(table("| step, from 3 s | s |", [f"| `{short(n)}` | {s} |" for n, s in rebuilt]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:5])
