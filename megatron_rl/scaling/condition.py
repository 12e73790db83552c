"""What is wrong with a fit, in words: codes that a program can test and texts that a person reads.

A fit with a serious finding is ill-conditioned: `well_conditioned` is False and `--strict` exits
with code 3.
"""

from typing import NamedTuple

from .report import amount

WIDE_A = 0.05
"""Width of the interval of A above which it says little (the run-to-run margin is 0.02)."""
FEW_POINTS = 7
FEW_BEYOND = 3


class Finding(NamedTuple):
    """One remark about a fit."""

    code: str
    text: str
    serious: bool

    def __str__(self) -> str:
        return self.text


def judge(
    *,
    a: float,
    a_low: float,
    a_high: float,
    b_bounds_hit: bool,
    cmid_bounds_hit: bool,
    cmid: float | None,
    r0: float,
    r0_at: float | None,
    a_fixed: bool,
    a_max: float,
    last: float,
    used: int,
    beyond: int,
    sigma: float,
    correlated: float,
    skipped: int,
    skip: float,
    unit: str,
) -> tuple[Finding, ...]:
    """All findings of a fit; the arguments are the fit's fields of the same names."""
    found: list[Finding] = []

    def add(code: str, text: str, serious: bool = True) -> None:
        found.append(Finding(code, text, serious))

    if cmid is not None and last < cmid:
        add(
            "ends_before_cmid",
            f"the data end at {amount(last)} {unit}, before Cmid ({amount(cmid)}): "
            "A is extrapolated from the first half of the gain",
        )
    elif cmid is not None and beyond < FEW_BEYOND:
        add("few_beyond_cmid", f"only {beyond} points lie beyond Cmid ({amount(cmid)} {unit})")
    if not a_fixed:
        if a_high - a_low > WIDE_A:
            add(
                "wide_a",
                f"the interval of A is {a_high - a_low:.3f} wide ({a_low:.3f} to {a_high:.3f}), "
                f"more than {WIDE_A}",
            )
        if a >= a_max - 1e-3:
            add("a_at_bound", f"A is at its upper bound {a_max:g}: the data set no asymptote")
        elif a - r0 <= 2 * sigma and cmid is not None:
            add("no_gain", f"A ({a:.3f}) is not above R0 ({r0:.3f}) by more than the noise")
    if b_bounds_hit:
        add("b_at_bound", "B is at a bound of its search range: the data do not show the rise")
    if cmid_bounds_hit:
        add(
            "cmid_at_bound",
            "Cmid is at a bound of its search range (a tenth of the first to 100 times the last "
            "compute): the data do not contain the rise",
        )
    if used < FEW_POINTS:
        add("few_points", f"only {used} points in the window")
    if r0_at is not None and r0_at > 0:
        add(
            "r0_after_start",
            f"R0 is the evaluation at {amount(r0_at)} {unit}, when the run had already learned: "
            "B and Cmid come out too high and A too low; give --r0 if the start is known",
            False,
        )
    if correlated > 0.9:
        add(
            "correlated",
            f"neighbouring residuals are correlated (probability {correlated:.2f}); "
            "the intervals allow for it",
            False,
        )
    if skipped:
        what = "point" if skipped == 1 else "points"
        add("skipped", f"{skipped} early {what} up to {amount(skip)} {unit} left out", False)
    return tuple(found)
