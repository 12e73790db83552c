"""CSV and TSV with a header line; lines that start with # are comments."""

import csv
from pathlib import Path

from ..errors import DataError
from .table import Table


def read(path: Path) -> Table:
    """Read a delimited file; the delimiter is a tab for .tsv, else comma or semicolon."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8 text ({error.reason})", "Save it as UTF-8", file=str(path)
        ) from None
    numbered = [
        (n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip() and line[0] != "#"
    ]
    if not numbered:
        raise DataError("the file is empty", "Give a header line and rows", file=str(path))
    first = numbered[0][1]
    delimiter = "\t" if path.suffix == ".tsv" else ";" if ";" in first and "," not in first else ","
    rows = list(csv.reader([line for _, line in numbered], delimiter=delimiter))
    header = [name.strip() for name in rows[0]]
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise DataError(
            f"two columns are named '{twice}'",
            "Rename one of them",
            file=str(path),
            line=numbered[0][0],
            column=twice,
        )
    lines = [n for n, _ in numbered[1:]]
    columns: dict[str, list[object]] = {name: [] for name in header}
    for line, row in zip(lines, rows[1:], strict=True):
        if len(row) != len(header):
            raise DataError(
                f"{len(row)} cells under {len(header)} columns",
                "Quote cells that contain the delimiter",
                file=str(path),
                line=line,
            )
        for name, cell in zip(header, row, strict=True):
            columns[name].append(cell)
    return Table(str(path), path.stem, columns, lines)
