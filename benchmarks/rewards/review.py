"""Errors of this verifier and of math-verify on answers that were not written for either.

    python -m benchmarks.rewards.review pairs.jsonl --verdicts FILE [--kinds FILE] [--write]

A row of the input is `{gold, answer, correct, source}`; `correct` is the source's label, or null.
With `as_written`, math-verify gets the texts as they are; otherwise in dollars, as its
documentation shows. Both verifiers judge every pair in the same run: this one with 2 s of CPU time
and gold answers as a data set reads them, math-verify with 5 s for each call. A row of the kinds
file is a pair that someone looked at: `{id, kind, correct}`. Its label replaces the source's; null
is a pair that has no right verdict. Without a label a pair counts as no error of either.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import time
from collections import Counter, defaultdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.machine import processor
from benchmarks.rewards.golden_vs_stock import stock
from megatron_rl.data.question import DataError, gold_text
from megatron_rl.rewards.math import verify

ROOT = Path(__file__).parents[2]
KINDS = Path(__file__).with_name("review_kinds.jsonl")
RESULT = ROOT / "benchmarks" / "results" / "math_review.json"
NAMES = {"this": "megatron_rl", "stock": f"math-verify {version('math-verify')}"}
UNREAD = ("answer in a sentence, no box", "another answer after the last box")
"""Kinds that no prompt of this package asks for: a long text has its answer in the last box."""
SHOWN = 70
"""Longer texts are not shown: they are more than an answer."""
Row = dict[str, Any]


def identity(row: Row) -> str:
    """Return the name of a pair in the file of kinds."""
    return hashlib.sha256(f"{row['gold']}\0{row['answer']}".encode()).hexdigest()[:12]


def stock_as_written(answer: str, gold: str) -> bool:
    """Return math-verify's verdict on texts with their own dollars and boxes."""
    import math_verify

    return bool(math_verify.verify(math_verify.parse(gold), math_verify.parse(answer)))


def judge(rows: list[Row], seconds: Counter[str]) -> None:
    """Add both verdicts to every row, and the seconds of each verifier to `seconds`."""
    for row in rows:
        started = time.perf_counter()
        try:
            verdict = verify(row["answer"], gold_text(row["gold"], "math"))
            row["this"], row["reason"] = (
                verdict.passed,
                f"{verdict.outcome.value}: {verdict.reason}",
            )
        except DataError as e:
            row["this"], row["reason"] = False, f"refused: {e}"
        between = time.perf_counter()
        call = stock_as_written if row.get("as_written") else stock
        row["stock"] = call(row["answer"], row["gold"])
        seconds["this"] += between - started  # type: ignore[assignment]
        seconds["stock"] += time.perf_counter() - between  # type: ignore[assignment]


def label(rows: list[Row], kinds: dict[str, Row]) -> None:
    """Add `truth` (None if unknown) and `kind` to every row."""
    for row in rows:
        known = kinds.get(identity(row))
        row["truth"] = known["correct"] if known else row["correct"]
        row["kind"] = known["kind"] if known else "not looked at"
        row["relabeled"] = known is not None and row["correct"] not in (None, known["correct"])


def errors(rows: list[Row], name: str) -> tuple[int, int]:
    """Return the numbers of false positives and false negatives of a verifier."""
    known = [row for row in rows if row["truth"] is not None and row[name] != row["truth"]]
    return sum(row[name] for row in known), sum(not row[name] for row in known)


def looked_at(row: Row) -> bool:
    """Tell whether verdicts and label differ, or an answer without any label passes."""
    truths = {row["this"], row["stock"], row["truth"], row["correct"]} - {None}
    return len(truths) > 1 or (row["correct"] is None and (row["this"] or row["stock"]))


def summary(rows: list[Row]) -> Row:
    """Return the counts of some rows."""
    out: Row = {
        "pairs": len(rows),
        "labeled": sum(row["truth"] is not None for row in rows),
        "agree": sum(row["this"] == row["stock"] for row in rows),
        "relabeled": sum(row["relabeled"] for row in rows),
    }
    for name in NAMES:
        out[name] = dict(
            zip(("false_positives", "false_negatives"), errors(rows, name), strict=True)
        )
    return out


def markdown(result: Row) -> str:
    """Return the result as a page."""
    head = "| pairs | labeled | agree | relabeled | FP this | FP stock | FN this | FN stock |"
    lines = [
        "# Review of the math verifier",
        "",
        f"`{result['command']}`, {result['date']}, {result['processor']}. The pairs are public test"
        " cases and outputs; none was written for this verifier. FP: a wrong answer passes; FN: a"
        f" right one fails; this: megatron_rl, stock: {NAMES['stock']} with its defaults."
        f" Seconds for all pairs: {result['seconds']['this']:.0f} and"
        f" {result['seconds']['stock']:.0f}.",
        "",
        *result["provenance"],
        "",
        "| source " + head,
        "|---|" + "--:|" * 8,
    ]
    for source, c in result["sources"].items():
        counts = (c["pairs"], c["labeled"], c["agree"], c["relabeled"])
        wrong = [c[n][e] for e in ("false_positives", "false_negatives") for n in NAMES]
        lines.append(f"| {source} | {' | '.join(map(str, (*counts, *wrong)))} |")
    lines += ["", "## Disagreements by kind", "", "With each other or with the source's label.", ""]
    lines += ["| kind | pairs | FP this | FP stock | FN this | FN stock | an example |"]
    lines += ["|---|--:|--:|--:|--:|--:|---|"]
    for kind, c in result["kinds"].items():
        wrong = [c[n][e] for e in ("false_positives", "false_negatives") for n in NAMES]
        row = f"| {kind} | {c['pairs']} | {' | '.join(map(str, wrong))} | {c['example']} |"
        lines.append(row)
    lines += ["", "## Errors of this verifier", "", "| kind | gold | answer | is right | outcome |"]
    lines += ["|---|---|---|---|---|"]
    for row in result["errors_of_this"]:
        cells = (row["kind"], code(row["gold"]), code(row["answer"]))
        lines.append(f"| {' | '.join(cells)} | {row['truth']} | {row['outcome']} |")
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """Return a short text as code in a table, and only the length of a long one."""
    if len(text) > SHOWN or "\n" in text:
        return f"(text of {len(text)} characters)"
    return "``" + text.replace("|", "\\|") + "``"


def review(rows: list[Row], kinds: dict[str, Row], seconds: dict[str, float]) -> Row:
    """Return counts by source and by kind of judged pairs."""
    label(rows, kinds)
    sources, by_kind = defaultdict(list), defaultdict(list)
    for row in rows:
        sources[row["source"]].append(row)
        if looked_at(row):
            by_kind[row["kind"]].append(row)
    result: Row = {
        "versions": NAMES,
        "seconds": seconds,
        "sources": {name: summary(part) for name, part in sources.items()},
        "kinds": {},
    }
    boxed = [row for row in rows if row["kind"] not in UNREAD]
    result["sources"] |= {"all": summary(rows), "all in a box or alone": summary(boxed)}
    for kind, part in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        shown = min(part, key=lambda row: len(row["gold"] + row["answer"]))
        example = f"{code(shown['answer'])} for {code(shown['gold'])}"
        result["kinds"][kind] = summary(part) | {"example": example}
    wrong = [row for row in rows if row["truth"] is not None and row["this"] != row["truth"]]
    result["errors_of_this"] = [
        {**{k: row[k] for k in ("source", "kind", "truth", "gold", "answer")},
         "outcome": row["reason"].partition(":")[0]}
        for row in sorted(wrong, key=lambda row: row["kind"]) if len(row["answer"]) <= SHOWN
    ]  # fmt: skip
    return result


def main() -> None:
    """Print the tables and what is not looked at; write them with --write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--kinds", type=Path, default=KINDS)
    parser.add_argument("--provenance", type=Path, help="lines on where the pairs come from")
    parser.add_argument(
        "--verdicts", type=Path, required=True, help="written, or counted again if it exists"
    )
    parser.add_argument("--todo", type=Path, help="write the pairs here that are not looked at")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rows = [json.loads(line) for line in arguments.pairs.read_text("utf-8").split("\n") if line]
    known = arguments.kinds.read_text("utf-8").split("\n") if arguments.kinds.exists() else []
    kinds = {row["id"]: row for row in map(json.loads, filter(None, known))}
    if arguments.verdicts.exists():
        judged = json.loads(arguments.verdicts.read_text("utf-8"))
    else:
        seconds: Counter[str] = Counter()
        judge(rows, seconds)
        judged = {"rows": rows, "seconds": dict(seconds)}
        arguments.verdicts.write_text(json.dumps(judged), "utf-8")
    rows = judged["rows"]
    result = review(rows, kinds, judged["seconds"])
    result["command"] = (
        "python -m benchmarks.rewards.review pairs.jsonl --verdicts verdicts.json --write"
    )
    result["date"] = date.today().isoformat()
    result["processor"] = processor()
    given = arguments.provenance
    result["provenance"] = given.read_text("utf-8").splitlines() if given else []
    text = markdown(result)
    print(text)
    if arguments.todo:
        todo = [r for r in rows if r["kind"] == "not looked at" and looked_at(r)]
        lines = (json.dumps({"id": identity(r)} | r, ensure_ascii=False) + "\n" for r in todo)
        arguments.todo.write_text("".join(lines))
    if arguments.write:
        RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        RESULT.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
