"""The default fit against the paper's grid with `curve_fit`, in one process, on every series.

python benchmarks/scaling/speed.py > benchmarks/results/scaling_speed.md
"""

import time
from collections.abc import Callable

from common import MADE, published, table

from megatron_rl.scaling import Series, fit
from megatron_rl.scaling.options import FitOptions
from megatron_rl.scaling.solve import solve, solve_paper
from megatron_rl.scaling.window import choose_window, make_problem

R0, SKIP = 0.395, 1400.0


def timed[T](function: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Least CPU seconds of one call, so that other work on the machine does not count."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        result = function()
        seconds.append(time.process_time() - start)
    return min(seconds), result


def measure(s: Series) -> list[str]:
    options = FitOptions(r0=R0, skip=SKIP)
    window = choose_window(s, options)
    p = make_problem(s.take(window.used), options, window.r0)
    fast, one = timed(lambda: solve(p), 5)
    complete, _ = timed(lambda: fit(s, r0=R0, skip=SKIP), 3)
    slow, two = timed(lambda: solve_paper(p, options), 1)
    no_larger = one.s <= two.s
    return [
        s.name, str(len(p.y)), f"{slow:.2f} s", f"{fast * 1e3:.1f} ms", f"{slow / fast:.0f}",
        f"{complete * 1e3:.0f} ms", f"{slow / complete:.0f}", f"{two.s:.4e}", f"{one.s:.4e}",
        "yes" if no_larger else "NO",
    ]  # fmt: skip


def main() -> None:
    print(f"# Speed\n\n{MADE}\n")
    print(f"CPU seconds, one thread; R0 {R0}, points up to {SKIP:g} GPU-hours skipped.\n")
    head = [
        "series", "n", "paper's grid", "default fit", "times faster", "with intervals",
        "times faster", "SSE paper", "SSE default", "no larger",
    ]  # fmt: skip
    table(head, [measure(s) for k, s in published().items() if not k.endswith("+")])


if __name__ == "__main__":
    main()
