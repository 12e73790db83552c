"""The trained tokens of chosen steps, with the ratio and the log-probs of both sides.

Each rank that reports (`ModelShards.reports`) writes its own tokens, without a gather, into
`<output_dir>/tokens/<step>-<rank>.npy`: an array of `COLUMNS`, 40 bytes per token.
"""

import io
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_rl.files import replace_file
from megatron_rl.messages import Batch, floats, ints

_WHOLE = ("step", "prompt_id", "completion", "position", "token", "staleness")
_REAL = ("advantage", "generator_logprob", "trainer_logprob", "ratio")
COLUMNS = np.dtype([*((name, "<i4") for name in _WHOLE), *((name, "<f4") for name in _REAL)])
"""Columns of a dump; `position` counts from the start of the completion, forced tokens included."""


def clear_tokens(output_dir: Path, step: int) -> None:
    """Remove the files of a step, which an interrupted run may have written with other ranks."""
    for path in output_dir.glob(f"tokens/{step}-*.npy"):
        path.unlink()


def write_tokens(
    output_dir: Path, batch: Batch, source: NDArray[np.int64], logprobs: NDArray[np.float32]
) -> None:
    """Write the trained ones (loss weight above 0) of this rank's completion tokens.

    They are at the flat positions `source` of the batch, with `logprobs` under the trained policy.
    """
    trained = floats(batch.loss_weights)[source] > 0
    source, logprobs = source[trained], logprobs[trained]
    sequence = np.searchsorted(ints(batch.bounds), source, side="right") - 1
    starts = ints(batch.bounds)[:-1] + ints(batch.prompt_lengths)
    rows = np.empty(len(source), COLUMNS)
    rows["step"] = batch.step
    rows["prompt_id"] = ints(batch.prompt_ids)[sequence]
    rows["completion"] = ints(batch.completion_indices)[sequence]
    rows["position"] = source - starts[sequence]
    rows["token"] = ints(batch.token_ids)[source]
    rows["staleness"] = batch.step - ints(batch.versions)[source]
    rows["advantage"] = floats(batch.advantages)[source]
    rows["generator_logprob"] = floats(batch.generator_logprobs)[source]
    rows["trainer_logprob"] = logprobs
    rows["ratio"] = np.exp((logprobs - rows["generator_logprob"]).astype(np.float64))
    np.save(content := io.BytesIO(), rows)
    (output_dir / "tokens").mkdir(parents=True, exist_ok=True)
    name = f"tokens/{batch.step}-{dist.get_rank()}.npy"
    replace_file(output_dir / name, content.getvalue())
