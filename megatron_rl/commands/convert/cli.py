"""`megatron-rl convert`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.commands.convert.errors import ConvertError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
FORMATS = ("keep", "bf16", "fp16", "fp32")


def size_in_bytes(text: str) -> int:
    """Bytes of "5GB", "512MiB" or "1000".

    Raises:
        ConvertError: not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B?)", text.strip().upper())
    if found is None or found[2] not in UNITS or float(found[1]) <= 0:
        raise ConvertError(f"{text!r} is no size: give one such as 5GB, 512MiB or 1000000")
    return int(float(found[1]) * UNITS[found[2]])


@app.command("convert")
def convert_command(
    source: Annotated[Path, typer.Argument(help="Hugging Face directory or Megatron checkpoint.")],
    target: Annotated[
        Path | None, typer.Argument(help="Directory to make; it must not exist.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face directory that a Megatron checkpoint was trained from: gives"
            " config.json, tokenizer and untrained tensors. Default: what the checkpoint carries."
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest safetensors file of a Hugging Face directory.")
    ] = "5GB",
    part_size: Annotated[
        str, typer.Option(help="Size of the files of a Megatron checkpoint.")
    ] = "1GB",
    dtype: Annotated[
        str,
        typer.Option(help="Number format of exported weights: keep, bf16, fp16 or fp32."),
    ] = "keep",
    workers: Annotated[int, typer.Option(min=1, help="Processes that convert at once.")] = 1,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare SOURCE with its SHA256SUMS; no TARGET.")
    ] = False,
) -> None:
    """Convert a checkpoint: Hugging Face to Megatron's distributed format, or back.

    The direction follows from what SOURCE is. Nothing is held in memory but single parameters, and
    a conversion that was killed goes on when it is started again.
    """
    try:
        _run(source, target, like, max_shard_size, part_size, dtype, workers, verify)
    except ConvertError as e:
        print(f"megatron-rl convert: {e}", file=sys.stderr)
        raise typer.Exit(2) from None


def _run(
    source: Path,
    target: Path | None,
    like: Path | None,
    max_shard_size: str,
    part_size: str,
    dtype: str,
    workers: int,
    verify: bool,
) -> None:
    if dtype not in FORMATS:
        raise ConvertError(f"--dtype is {dtype!r}: known are {', '.join(FORMATS)}")
    if not source.is_dir():
        raise ConvertError(f"{source}: no such directory")
    if (target is None) != verify:
        raise ConvertError("give a TARGET to convert to, or --verify and none to check SOURCE")
    import torch

    from megatron_rl.commands.convert import job, to_huggingface, to_megatron

    before = peak_mib()
    if target is None:
        print(f"{source}: {job.verify(source)} files are as they were converted")
        return
    formats = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if (source / "config.json").is_file():
        if dtype != "keep" or like is not None:
            raise ConvertError("--dtype and --like are for Megatron checkpoints: leave them out")
        made = to_megatron.convert(source, target, size_in_bytes(part_size), workers, _say)
    else:
        shard = size_in_bytes(max_shard_size)
        made = to_huggingface.convert(
            source, target, like, shard, formats.get(dtype), workers, _say
        )
    _say(
        f"wrote {made}; peak memory of this process {peak_mib():.0f} MiB, of which"
        f" {before:.0f} MiB were there after the imports"
    )


def _say(line: str) -> None:
    print(line, flush=True)


def peak_mib() -> float:
    """Largest resident memory of this process so far, in MiB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
