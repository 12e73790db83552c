"""`megatron-rl data`: prompt sets from public data sets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, help="Prompt sets: prepare one."
)


@app.callback()
def _data() -> None:
    """Prompt sets."""


@app.command()
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="polaris, deepcoder, another data set's name on the hub, a file or a folder."
        ),
    ],
    output: Annotated[
        Path, typer.Argument(help="Folder for train.jsonl, heldout.jsonl, dropped.jsonl, report.")
    ],
    local: Annotated[
        Path | None, typer.Option(help="Local copy to read instead of the hub: file or folder.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Verifier: math, code, exact, custom; default: math.")
    ] = None,
    subset: Annotated[
        list[str] | None, typer.Option(help="Configuration on the hub. Can be repeated.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split; default: train.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit on the hub; pin it for the same bytes later.")
    ] = None,
    prompt_field: Annotated[str | None, typer.Option(help="Field of the question.")] = None,
    answer_field: Annotated[str | None, typer.Option(help="Field of answer or tests.")] = None,
    template: Annotated[
        str | None, typer.Option(help="Text of a prompt with {prompt} in it.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Evaluation set to decontaminate against: aime2024, aime2025, math500,"
            " livecodebench, NAME=PATH of a local copy, or a .jsonl. Can be repeated."
        ),
    ] = None,
    ngram_words: Annotated[int, typer.Option(min=2, help="Words of an n-gram.")] = 8,
    overlap: Annotated[
        float, typer.Option(help="Share of common n-grams from which two questions overlap.")
    ] = 0.5,
    heldout: Annotated[int, typer.Option(min=0, help="Held-out questions.")] = 1000,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder with a tokenizer.json, for --max-tokens.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt [tokens].")] = 2048,
    max_answer_kib: Annotated[int, typer.Option(min=1, help="Longest answer or tests.")] = 4096,
    keep_unreadable: Annotated[
        bool, typer.Option("--keep-unreadable", help="Keep answers that cannot be verified.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the held-out split.")] = 0,
) -> None:
    """Make a prompt set: checked, without duplicates, decontaminated, with a held-out split.

    The same input gives the same bytes. What is dropped is in dropped.jsonl with line and reason.
    """
    from dataclasses import replace

    from megatron_rl.commands.prepare.prepare import prepare as prepared
    from megatron_rl.commands.prepare.prepare_settings import KNOWN, Known, Settings
    from megatron_rl.data.jsonl import Fields
    from megatron_rl.data.question import DataError

    known = KNOWN.get(source, Known(source, "math", Fields()))
    fields = replace(
        known.fields,
        prompt=prompt_field or known.fields.prompt,
        gold=answer_field or known.fields.gold,
    )
    try:
        if template is not None and "{prompt}" not in template:
            raise DataError(f"--template is {template!r}: it must have {{prompt}} in it")
        if not 0 < overlap <= 1:
            raise DataError(f"--overlap is {overlap:g}: it must be above 0 and at most 1")
        settings = Settings(
            source=str(local or known.source),
            name=source if source in KNOWN else Path(source).stem,
            kind=kind or known.kind,
            fields=fields,
            subsets=tuple(subset) if subset else known.subsets,
            split=split or known.split,
            revision=revision,
            template=template,
            against=tuple(against or ()),
            ngram_words=ngram_words,
            overlap=overlap,
            heldout=heldout,
            tokenizer=tokenizer,
            max_tokens=max_tokens,
            max_answer_kib=max_answer_kib,
            keep_unreadable=keep_unreadable,
            seed=seed,
        )
        report = prepared(settings, output, lambda line: print(line, file=sys.stderr))
    except DataError as e:
        print(f"megatron-rl data prepare: {e}", file=sys.stderr)
        raise typer.Exit(2) from None
    _show(report, output)


def _show(report: dict[str, Any], output: Path) -> None:
    from megatron_rl.commands.prepare.prepare import REASONS

    print(f"{report['rows']} rows: {report['train']} to train on, {report['heldout']} held out")
    for reason, count in report["dropped"].items():
        if count:
            print(f"  {count} dropped, {reason}: {REASONS[reason]}")
    print(f"in {output}: train.jsonl, heldout.jsonl, dropped.jsonl (by line), report.json")
