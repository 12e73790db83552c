"""The availability of a run: what it lost, and the seconds until it had recovered."""

from typing import Any

from megatron_rl.metrics.metrics_file import Row, mean


def availability(rows: list[Row]) -> dict[str, Any]:
    """Return shares of time and recoveries by name; values that were not measured are None.

    `trainer_busy` is the share of the time of all steps in which the trainer trained,
    `generators_busy` that of generators with a request to decode. A recovery of a generator is the
    time until it had work again, one of the trainer that from the last row before to the first step
    after, in seconds.
    """
    steps = [row for row in rows if row["kind"] == "step"]
    events = [row for row in rows if row["kind"] == "event"]
    lost = [row for row in events if row["event"] == "generator_lost"]
    waiting = mean(steps, "generator_wait_fraction", "step_seconds")
    names = {row["generator"] for row in lost}
    back = [
        row["recovery_seconds"]
        for row in events
        if row["event"] == "generator_ready" and row["generator"] in names
    ]
    return {
        "trainer_busy": mean(steps, "trainer_busy_fraction", "step_seconds"),
        "generators_busy": None if waiting is None else 1 - waiting,
        "generators_lost": len(lost),
        "generator_recoveries": back[-len(lost) :] if lost else [],
        "completions_again": sum(row["completions_again"] for row in lost),
        "completions_continued": sum(row["completions_continued"] for row in lost),
        "tokens_continued": sum(row["tokens_continued"] for row in lost),
        "prompts_failed": sum(row["event"] == "prompt_failed" for row in events),
        "trainer_recoveries": _trainer_recoveries(rows),
    }


def _trainer_recoveries(rows: list[Row]) -> list[float]:
    recoveries = []
    for i, row in enumerate(rows):
        if row.get("event") != "resumed":
            continue
        before = [r["unix_seconds"] for r in rows[:i] if "unix_seconds" in r]
        last = max([*before, row.get("last_unix_seconds", 0.0)], default=0.0)
        after = next((r["unix_seconds"] for r in rows[i:] if r["kind"] == "step"), None)
        if last and after is not None:
            recoveries.append(after - last)
    return recoveries
