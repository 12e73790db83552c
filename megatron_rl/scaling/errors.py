"""What the fitter raises."""


class DataError(ValueError):
    """The input cannot be fitted: names file, line and column where known, and the remedy."""

    def __init__(
        self,
        problem: str,
        remedy: str,
        *,
        file: str | None = None,
        line: int | None = None,
        column: str | None = None,
    ) -> None:
        self.file, self.line, self.column, self.remedy = file, line, column, remedy
        where = ""
        if file is not None:
            where = file
            if line is not None:
                where += f", line {line}"
            if column is not None:
                where += f", column '{column}'"
            where += ": "
        elif column is not None:
            where = f"column '{column}': "
        super().__init__(f"{where}{problem}. {remedy}")


class MissingExtra(ImportError):
    """An optional package is needed for this function: names it and the extra that brings it."""

    def __init__(self, package: str, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs the package '{package}': pip install {package}, "
            f"or pip install 'megatron-rl[{extra}]'"
        )
