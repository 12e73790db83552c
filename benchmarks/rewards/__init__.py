"""Benchmarks of the verifiers: errors compared with math-verify, speed with and without bombs."""

from pathlib import Path


def publish(lines: list[str], path: Path | None) -> None:
    """Print a report, and write it to a file of benchmarks/results unless that is None."""
    text = "\n".join(lines) + "\n"
    print(text)
    if path is not None:
        path.write_text(text)
