"""`megatron-rl convert`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, Field, TypeAdapter, ValidationError
from typer import Argument, Option

from megatron_rl.commands.convert import resumable
from megatron_rl.commands.convert.resumable import ConvertError
from megatron_rl.models import CheckpointError

app = typer.Typer()
DTYPES = {"keep": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LIKE = """Hugging Face directory that a Megatron checkpoint was trained from: source of config.json,
tokenizer and untrained tensors. Default: the one in the checkpoint."""
SHARD = "Largest safetensors file of a Hugging Face directory."
DTYPE = "Dtype of exported weights: keep, bf16, fp16 or fp32."
VERIFY = "Compare SOURCE with its SHA256SUMS; no TARGET."


@app.command("convert")
def convert_command(
    source: Annotated[Path, Argument(help="Hugging Face directory or Megatron checkpoint.")],
    target: Annotated[Path | None, Argument(help="Directory to make.")] = None,
    like: Annotated[Path | None, Option(help=LIKE)] = None,
    max_shard_size: Annotated[str, Option(help=SHARD)] = "1GB",
    part_size: Annotated[str, Option(help="Size of the files of a Megatron checkpoint.")] = "1GB",
    dtype: Annotated[str, Option(help=DTYPE)] = "keep",
    workers: Annotated[int, Option(min=1, help="Files that are written at once.")] = 1,
    verify: Annotated[bool, Option("--verify", help=VERIFY)] = False,
) -> None:
    """Convert a checkpoint: Hugging Face to Megatron's distributed format, or back.

    The direction follows from the format of SOURCE. Memory use is about one output file per worker.
    A killed conversion resumes when it is started again.
    """
    try:
        if dtype not in DTYPES:
            raise ConvertError(f"--dtype is {dtype!r}: known are {', '.join(DTYPES)}")
        if not source.is_dir():
            raise ConvertError(f"{source}: no such directory")
        if (target is None) != verify:
            raise ConvertError("give a TARGET to convert to, or --verify without one")
        if target is None:
            print(f"{source}: {resumable.verify(source)} files match {resumable.SUMS}")
            return
        is_hugging_face = (source / "config.json").is_file()
        if is_hugging_face and (dtype != "keep" or like is not None):
            raise ConvertError("--dtype and --like are for Megatron checkpoints: leave them out")
        size = size_in_bytes(part_size if is_hugging_face else max_shard_size)
        output = resumable.Output(target.absolute(), size, workers)
        from megatron_rl.commands.convert import to_huggingface, to_megatron

        if is_hugging_face:
            to_megatron.convert(source, output)
        else:
            to_huggingface.convert(source, output, like, DTYPES[dtype])
        print(f"wrote {target}")
    except CheckpointError as e:
        print(f"megatron-rl convert: {e}", file=sys.stderr)
        raise typer.Exit(2) from None


def size_in_bytes(text: str) -> int:
    """Return the bytes of "5GB", "512MiB" or "1000".

    Raises:
        ConvertError: not a size.
    """
    try:
        return TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text)
    except ValidationError:
        raise ConvertError(f"{text!r} is not a size: give one like 5GB, 512MiB or 1000") from None
