"""`megatron-rl data`: prompt sets from public data sets."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Prompt sets: prepare one.")
app.callback()(lambda: None)  # without a callback Typer makes a sole command the whole program

SOURCE = "polaris, deepcoder, another data set's name on the hub, a file or a folder."
OUTPUT = "Folder for train.jsonl, heldout.jsonl, dropped.jsonl, report.json."
LOCAL = "Local copy to read instead of the hub: file or folder."
KIND = "Verifier: math, code, exact, custom; default: math."
SUBSET = "Configuration on the hub. Can be repeated."
AGAINST = (
    "Evaluation set to decontaminate against: aime2024, aime2025, math500, livecodebench,"
    " NAME=PATH of a local copy, or a .jsonl. Can be repeated."
)
OVERLAP = "Share of common n-grams from which two questions overlap."
TOKENIZER = "Folder with a tokenizer.json, for --max-tokens."


@app.command()
def prepare(
    source: Annotated[str, typer.Argument(help=SOURCE)],
    output: Annotated[Path, typer.Argument(help=OUTPUT)],
    local: Annotated[Path | None, typer.Option(help=LOCAL)] = None,
    kind: Annotated[str | None, typer.Option(help=KIND)] = None,
    subset: Annotated[list[str] | None, typer.Option(help=SUBSET)] = None,
    split: Annotated[str | None, typer.Option(help="Split; default: train.")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit on the hub; pin it.")] = None,
    prompt_field: Annotated[str, typer.Option(help="Field of the question.")] = "",
    answer_field: Annotated[str, typer.Option(help="Field of answer or tests.")] = "",
    template: Annotated[str | None, typer.Option(help="Text of a prompt with {prompt}.")] = None,
    against: Annotated[list[str] | None, typer.Option(help=AGAINST)] = None,
    ngram_words: Annotated[int, typer.Option(min=2, help="Words of an n-gram.")] = 8,
    overlap: Annotated[float, typer.Option(help=OVERLAP)] = 0.5,
    heldout: Annotated[int, typer.Option(min=0, help="Held-out questions.")] = 1000,
    tokenizer: Annotated[str | None, typer.Option(help=TOKENIZER)] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt [tokens].")] = 2048,
    max_answer_kib: Annotated[int, typer.Option(min=1, help="Longest answer or tests.")] = 4096,
    seed: Annotated[int, typer.Option(help="Seed of the held-out split.")] = 0,
) -> None:
    """Make a prompt set: checked, without duplicates, decontaminated, with a held-out split.

    The same input gives the same bytes. Dropped rows are in dropped.jsonl, with line and reason.
    """
    from megatron_rl.commands.prepare import prepare as preparation
    from megatron_rl.data.published import TRAINING_SETS, DataSet
    from megatron_rl.data.question import DataError

    known = TRAINING_SETS.get(source, DataSet(source))
    prompt, gold = prompt_field or known.fields.prompt, answer_field or known.fields.gold
    settings = preparation.PrepareSettings(
        source=str(local or known.source),
        name=source if source in TRAINING_SETS else Path(source).stem,
        kind=kind or known.kind,
        fields=replace(known.fields, prompt=prompt, gold=gold),
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
        seed=seed,
    )
    try:
        report = preparation.prepare(settings, output, lambda line: print(line, file=sys.stderr))
    except DataError as e:
        print(f"megatron-rl data prepare: {e}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"{report['rows']} rows: {report['train']} to train on, {report['heldout']} held out")
    for reason, count in report["dropped"].items():
        if count:
            print(f"  {count} dropped, {reason}: {preparation.REASONS[reason]}")
    print(f"in {output}: train.jsonl, heldout.jsonl, dropped.jsonl (by line), report.json")
