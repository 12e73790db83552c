"""Warnings of a fit.

A fit with a serious warning is ill-conditioned: `well_conditioned` is False and `--strict` exits
with code 3.
"""

from collections.abc import Iterator

from .fit_result import Fit, FitWarning, amount

WIDE_A = 0.05
"""Largest width of the interval of A without a warning (the run-to-run margin is 0.02)."""
FEW_POINTS = 7
FEW_BEYOND = 3


def find_warnings(f: Fit) -> tuple[FitWarning, ...]:
    """Return the warnings of a fit, serious ones first."""
    serious = [FitWarning(code, text, True) for code, text in _serious(f)]
    return (*serious, *(FitWarning(code, text, False) for code, text in _remarks(f)))


def _serious(f: Fit) -> Iterator[tuple[str, str]]:
    """Yield code and text of the reasons why the data do not determine the curve."""
    a, point, unit = f.A, f.point, f.unit
    (u0, u1), (v0, v1) = f.problem.shape.bounds()
    if f.Cmid is not None:
        cmid, used = f.Cmid.value, f.series.compute[f.window.used]
        beyond = int((used > cmid).sum())
        if used[-1] < cmid:
            text = f"the data end at {amount(float(used[-1]))} {unit}, before Cmid ({amount(cmid)})"
            yield "ends_before_cmid", f"{text}: A is extrapolated from the first half of the gain"
        elif beyond < FEW_BEYOND:
            text = f"only {beyond} points lie beyond Cmid ({amount(cmid)} {unit})"
            yield "few_beyond_cmid", text
    if not a.fixed:
        if a.high - a.low > WIDE_A:
            text = f"the interval of A is {a.high - a.low:.3f} wide ({a.low:.3f} to {a.high:.3f})"
            yield "wide_a", f"{text}, more than {WIDE_A}"
        if a.value >= f.options.a_max - 1e-3:
            text = f"A is at its upper bound {f.options.a_max:g}: the data determine no asymptote"
            yield "a_at_bound", text
        elif f.Cmid is not None and a.value - point.r0 <= 2 * f.sigma:
            text = f"A ({a.value:.3f}) is not above R0 ({point.r0:.3f}) by more than the noise"
            yield "no_gain", text
    if min(point.v - v0, v1 - point.v) < 1e-3:
        yield "b_at_bound", "B is at a bound of its search range: the data do not show the rise"
    if f.Cmid is not None and min(point.u - u0, u1 - point.u) < 1e-3:
        text = "Cmid is at a bound of its search range (a tenth of the first to 100 times the last"
        yield "cmid_at_bound", f"{text} compute): the data do not contain the rise"
    if f.n < FEW_POINTS:
        yield "few_points", f"only {f.n} points in the window"


def _remarks(f: Fit) -> Iterator[tuple[str, str]]:
    """Yield code and text of remarks on the points and their noise."""
    w = f.window
    if w.r0_at is not None and w.r0_at > 0:
        text = f"R0 is the evaluation at {amount(w.r0_at)} {f.unit}, after the run had learned"
        remedy = "give --r0 if the start is known"
        yield "r0_after_start", f"{text}: B and Cmid come out too high and A too low; {remedy}"
    if f.correlated > 0.9:
        text = f"neighboring residuals are correlated (probability {f.correlated:.2f})"
        yield "correlated", f"{text}; the intervals allow for it"
    if skipped := int(w.skipped.sum()):
        points = "point" if skipped == 1 else "points"
        yield "skipped", f"{skipped} early {points} up to {amount(w.skip)} {f.unit} left out"
