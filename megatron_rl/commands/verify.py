"""`megatron-rl verify` and `megatron-rl rewards try`: verdicts at the terminal."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from megatron_rl.config import ConfigError
from megatron_rl.data.question import DataError
from megatron_rl.data.tables import read_lines
from megatron_rl.rewards.base import Outcome, Verdict, VerifierError
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier_settings import VerifierSettings

app = typer.Typer(help="Verdicts on answers.")
rewards = typer.Typer(name="rewards", no_args_is_help=True, help="Try reward functions.")
app.add_typer(rewards)

CASES = "JSON Lines with gold, answer and optionally the expected verdict."
SAMPLES = "JSON Lines with completion, gold, optionally kind and meta."
FUNCTION = "Import path package.module:function of a custom reward."
Json = Annotated[bool, Option("--json", help="Print one JSON object per verdict.")]


@app.command()
def verify(
    gold: Annotated[str | None, Option(help="Right answer.")] = None,
    answer: Annotated[str | None, Option(help="Answer or completion; its last box counts.")] = None,
    file: Annotated[Path | None, Option(help=CASES)] = None,
    as_json: Json = False,
    workers: Annotated[int, Option(min=1, help="Worker processes for --file.")] = 2,
) -> None:
    r"""Check mathematical answers: `megatron-rl verify --gold '1/2' --answer '\frac{2}{4}'`.

    Exit status 0: all correct (with --file: as expected); 1: not all; 2: the verifier failed.
    """
    if file is None and gold is not None and answer is not None:
        cases = [{"gold": gold, "answer": answer}]
    elif file is not None and gold is None and answer is None:
        cases = _read(file, ("gold", "answer"))
    else:
        raise ConfigError("give --gold and --answer, or --file")
    meta = {"boxed": False, "ended_thinking": False}
    rows = [("math", c["answer"], c["gold"], meta) for c in cases]
    verdicts = _verdicts(VerifierSettings(workers=min(workers, len(rows))), rows)
    good = True
    for case, verdict in zip(cases, verdicts, strict=True):
        expected = case.get("verdict", Outcome.CORRECT)
        as_expected = verdict.outcome.value == expected
        good &= as_expected
        if as_json:
            row = {"gold": case["gold"], "answer": case["answer"], "verdict": verdict.outcome}
            print(json.dumps({**row, "reason": verdict.reason}))
        elif file is None:
            print(f"{verdict.outcome}: {verdict.reason}")
        elif not as_expected:
            print(f"{verdict.outcome} (expected {expected}): {verdict.reason}")
    if file is not None and not as_json:
        print(f"{len(verdicts)} answers: {_counts(verdicts)}")
    raise typer.Exit(0 if good else 1)


@rewards.command("try")
def try_rewards(
    file: Annotated[Path, Argument(help=SAMPLES)],
    function: Annotated[str | None, Option(help=FUNCTION)] = None,
    kind: Annotated[str, Option(help="Task kind of rows without one.")] = "math",
    samples: Annotated[int, Option(min=1, help="Rows to try.")] = 20,
    sandbox: Annotated[str, Option(help="strong, or weak (rlimits and seccomp only).")] = "strong",
    workers: Annotated[int, Option(min=1, help="Worker processes.")] = 2,
    as_json: Json = False,
) -> None:
    """Call a reward on samples as a run would; print verdicts, rewards and speed.

    A custom reward is `reward(completion: str, gold: str, meta: dict) -> bool | float | Verdict`,
    `def` or `async def`.
    """
    settings = VerifierSettings.model_validate(
        {"workers": workers, "custom": function, "sandbox": {"isolation": sandbox}}
    )
    default = "custom" if function else kind
    rows = [
        (str(c.get("kind", default)), c["completion"], c["gold"], dict(c.get("meta") or {}))
        for c in _read(file, ("completion", "gold"))[:samples]
    ]
    started = time.monotonic()
    verdicts = _verdicts(settings, rows)
    seconds = time.monotonic() - started
    for index, verdict in enumerate(verdicts):
        reward = settings.values.of(verdict)
        if as_json:
            row = {"verdict": verdict.outcome, "reward": reward, "reason": verdict.reason}
            print(json.dumps({"row": index, **row}))
        else:
            shown = "left out" if reward is None else f"{reward:+g}"
            print(f"row {index}: {verdict.outcome}, reward {shown}: {verdict.reason}")
    if not as_json:
        start = "including the start of the workers"
        print(f"{len(verdicts)} rows in {seconds:.1f} s {start}: {_counts(verdicts)}")


def _counts(verdicts: list[Verdict]) -> str:
    counts = Counter(v.outcome.value for v in verdicts)
    return ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))


def _read(path: Path, required: tuple[str, ...]) -> list[dict[str, Any]]:
    """Read the rows of a JSON Lines file, which must have these texts or numbers."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        rows = list(read_lines(path, str(path)))
    except DataError as e:
        raise ConfigError(str(e)) from None
    for row in rows:
        given = {name: row.values[name] for name in required if name in row.values}
        row.values.update({k: str(v) for k, v in given.items() if isinstance(v, int | float)})
        missing = [name for name in required if not isinstance(row.values.get(name), str)]
        if row.problem or missing:
            problem = row.problem or f"no text under {', '.join(missing)}"
            raise ConfigError(f"{path}:{row.line}: {problem}")
    if not rows:
        raise ConfigError(f"{path}: no rows")
    return [row.values for row in rows]


def _verdicts(
    settings: VerifierSettings, rows: list[tuple[str, str, str, dict[str, Any]]]
) -> list[Verdict]:
    async def run() -> list[Verdict]:
        async with VerifierPool(settings, sorted({kind for kind, *_ in rows})) as pool:
            return list(await asyncio.gather(*(pool.verify(*row) for row in rows)))

    try:
        return asyncio.run(run())
    except VerifierError as e:
        raise ConfigError(str(e)) from None
