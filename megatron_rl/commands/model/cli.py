"""`megatron-rl model`: pretrained models for runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Pretrained models: fetch one.")
app.callback()(lambda: None)  # without a callback Typer makes a sole command the whole program

NAME = "Name of the model: smollm2-135m."
FOLDER = "Directory to make; default: where `--model NAME` finds it."
TIMEOUT = "Longest download, and longest conversion [s]."


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help=NAME)],
    folder: Annotated[Path | None, typer.Argument(help=FOLDER)] = None,
    timeout: Annotated[float, typer.Option(min=1, help=TIMEOUT)] = 1800,
) -> None:
    """Fetch a pretrained model as a Hugging Face directory, and print the directory.

    A directory that is there is compared with its SHA256SUMS. Afterwards `megatron-rl train
    --model NAME` starts from it, or `--model FOLDER` if FOLDER was given.
    """
    from megatron_rl.commands.model.fetch_model import fetch_model
    from megatron_rl.models import CheckpointError

    try:
        print(fetch_model(name, folder, timeout))
    except (CheckpointError, OSError) as e:
        print(f"megatron-rl model fetch: {e}", file=sys.stderr)
        raise typer.Exit(2) from None
