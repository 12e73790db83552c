"""Benchmarks of the verifiers: errors compared with math-verify, speed with and without bombs."""

from pathlib import Path


def publish(lines: list[str], path: Path | None) -> None:
    """Print a report, and write it to a file of benchmarks/results unless that is None."""
    text = "\n".join(lines) + "\n"
    print(text)
    if path is not None:
        path.write_text(text)


def processor() -> str:
    """Return the name of this machine's processor and the number of its cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}"
