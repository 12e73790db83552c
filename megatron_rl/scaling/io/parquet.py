"""Parquet files; line numbers in messages are row numbers."""

from pathlib import Path

from ..errors import DataError, MissingExtra
from .table import Table


def read(path: Path) -> Table:
    """Read all columns of a Parquet file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", f"Reading {path}", "io") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(
            f"not a Parquet file ({error})", "Check the file's format", file=str(path)
        ) from None
    columns: dict[str, list[object]] = {n: table[n].to_pylist() for n in table.column_names}
    return Table(str(path), path.stem, columns, list(range(1, table.num_rows + 1)))
