"""`megatron-rl verify` and `megatron-rl rewards`: verdicts at the terminal."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from megatron_rl.rewards.base import Outcome, Verdict, VerifierError
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier_settings import SandboxSettings, VerifierSettings

app = typer.Typer(help="Verdicts on answers.")
rewards = typer.Typer(no_args_is_help=True, help="Reward functions: try one, serve the sandbox.")
app.add_typer(rewards, name="rewards")

EXIT_WRONG, EXIT_ERROR = 1, 2
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object per verdict.")]
SandboxOption = Annotated[
    str, typer.Option("--sandbox", help="strong, or weak: accept rlimits and seccomp only.")
]


def _fail(message: str) -> NoReturn:
    print(f"megatron-rl: {message}", file=sys.stderr)
    raise typer.Exit(EXIT_ERROR)


@app.command()
def verify(
    gold: Annotated[str | None, typer.Option(help="Right answer.")] = None,
    answer: Annotated[
        str | None, typer.Option(help="Answer or completion: its last box counts.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="JSON Lines with gold and answer, and optionally the verdict to expect."),
    ] = None,
    as_json: JsonOption = False,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes for --file.")] = 2,
) -> None:
    """Check mathematical answers: `megatron-rl verify --gold '1/2' --answer '\\frac{2}{4}'`.

    Exit status 0: all correct (with --file: as expected); 1: not; 2: no verdict is to be had.
    """
    if file is None and gold is not None and answer is not None:
        cases = [{"gold": gold, "answer": answer}]
    elif file is not None and gold is None and answer is None:
        cases = _read(file, ("gold", "answer"))
    else:
        _fail("give --gold and --answer, or --file")
    rows = [
        ("math", c["answer"], c["gold"], {"boxed": False, "ended_thinking": False}) for c in cases
    ]
    verdicts = _verdicts(VerifierSettings(workers=min(workers, len(rows))), rows)
    good = True
    for case, verdict in zip(cases, verdicts, strict=True):
        expected = case.get("verdict", Outcome.CORRECT)
        as_expected = verdict.verdict.value == expected
        good &= as_expected
        if as_json:
            shown = {"gold": case["gold"], "answer": case["answer"]}
            print(json.dumps({**shown, "verdict": verdict.verdict, "reason": verdict.reason}))
        elif file is None:
            print(f"{verdict.verdict}: {verdict.reason}")
        elif not as_expected:
            print(f"{verdict.verdict} (expected {expected}): {verdict.reason}")
    if file is not None and not as_json:
        counts = Counter(v.verdict.value for v in verdicts)
        print(
            f"{len(verdicts)} answers: {', '.join(f'{n} {k}' for k, n in sorted(counts.items()))}"
        )
    raise typer.Exit(0 if good else EXIT_WRONG)


@rewards.command("try")
def try_rewards(
    file: Annotated[
        Path, typer.Argument(help="JSON Lines with completion, gold, and optionally kind and meta.")
    ],
    function: Annotated[
        str | None, typer.Option(help="Import path package.module:function of a custom reward.")
    ] = None,
    kind: Annotated[str, typer.Option(help="Task kind of rows without one.")] = "math",
    samples: Annotated[int, typer.Option(min=1, help="Rows that are tried.")] = 20,
    sandbox: SandboxOption = "strong",
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Dry run of a reward on samples, as a run would call it; prints verdicts, rewards and speed.

    A custom reward is `reward(completion: str, gold: str, meta: dict) -> bool | float | Verdict`,
    `def` or `async def`.
    """
    settings = VerifierSettings.model_validate(
        {"workers": workers, "custom": function, "sandbox": {"isolation": sandbox}}
    )
    default = "custom" if function else kind
    cases = _read(file, ("completion", "gold"))[:samples]
    rows = [
        (str(c.get("kind", default)), c["completion"], c["gold"], dict(c.get("meta") or {}))
        for c in cases
    ]
    started = time.monotonic()
    verdicts = _verdicts(settings, rows)
    seconds = time.monotonic() - started
    for index, verdict in enumerate(verdicts):
        reward = settings.values.of(verdict)
        if as_json:
            row = {"verdict": verdict.verdict, "reward": reward, "reason": verdict.reason}
            print(json.dumps({"row": index, **row}))
        else:
            shown = "left out" if reward is None else f"{reward:+g}"
            print(f"row {index}: {verdict.verdict}, reward {shown}: {verdict.reason}")
    if not as_json:
        counts = Counter(v.verdict.value for v in verdicts)
        summary = ", ".join(f"{n} {k}" for k, n in sorted(counts.items()))
        print(f"{len(verdicts)} rows in {seconds:.1f} s with the workers' start: {summary}")


@rewards.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8077,
    programs: Annotated[int, typer.Option(min=1, help="Programs at once.")] = 4,
    sandbox: SandboxOption = "strong",
) -> None:
    """Serve this host's sandbox to runs with verifier.sandbox.isolation=remote.

    There is no authentication: listen where only the run's machines can connect.
    """
    from megatron_rl.rewards.code.remote import SandboxServer

    settings = SandboxSettings.model_validate({"isolation": sandbox})
    try:
        server = SandboxServer(settings, host, port, programs)
    except VerifierError as e:
        _fail(str(e))
    print(f"sandbox ({sandbox}) at {server.address}", flush=True)
    try:
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()


def _read(path: Path, needed: tuple[str, ...]) -> list[dict[str, Any]]:
    if not path.is_file():
        _fail(f"{path}: no such file")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as e:
            _fail(f"{path}:{number}: not JSON: {e}")
        missing = [
            n for n in needed if not isinstance(row, dict) or not isinstance(row.get(n), str)
        ]
        if missing:
            _fail(f"{path}:{number}: no text under {', '.join(missing)}")
        rows.append(row)
    if not rows:
        _fail(f"{path}: no rows")
    return rows


def _verdicts(
    settings: VerifierSettings, rows: list[tuple[str, str, str, dict[str, Any]]]
) -> list[Verdict]:
    kinds = sorted({kind for kind, *_ in rows})

    async def run() -> list[Verdict]:
        async with VerifierPool(settings, kinds) as pool:
            return list(await asyncio.gather(*(pool.verify(*row) for row in rows)))

    try:
        return asyncio.run(run())
    except VerifierError as e:
        _fail(str(e))
