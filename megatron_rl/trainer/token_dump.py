"""The trained tokens of chosen steps, with the ratio and the log-probs of both sides.

Each rank that reports (`ModelShards.reports`) writes its own tokens, without a gather, into
`<output_dir>/tokens/<step>-<rank>.npy`: an array of `COLUMNS`, 40 bytes per token.
"""

import io
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_rl import messages
from megatron_rl.files import replace_file

_WHOLE = ("step", "prompt_id", "completion", "position", "token", "staleness")
_REAL = ("advantage", "generator_logprob", "trainer_logprob", "ratio")
COLUMNS = np.dtype([*((name, "<i4") for name in _WHOLE), *((name, "<f4") for name in _REAL)])
"""Columns of a dump; `position` counts from the start of the completion, forced tokens included."""


def clear_tokens(output_dir: Path, step: int) -> None:
    """Remove the files of a step, which an interrupted run may have written with other ranks."""
    for path in output_dir.glob(f"tokens/{step}-*.npy"):
        path.unlink()


def write_tokens(
    output_dir: Path,
    batch: messages.Batch,
    source: NDArray[np.int64],
    logprobs: NDArray[np.float32],
) -> None:
    """Write this rank's trained tokens (loss weight above 0).

    Args:
        output_dir: of the run.
        batch: the step's.
        source: flat positions of this rank's completion tokens in the batch.
        logprobs: their log-probs under the trained policy in nats.
    """
    trained = messages.floats(batch.loss_weights)[source] > 0
    logprobs, source = logprobs[trained], source[trained]
    bounds = messages.ints(batch.bounds)
    sequence = np.searchsorted(bounds, source, side="right") - 1
    generator = messages.floats(batch.generator_logprobs)[source]
    columns = {
        "step": batch.step,
        "prompt_id": messages.ints(batch.prompt_ids)[sequence],
        "completion": messages.ints(batch.completion_indices)[sequence],
        "position": source - bounds[sequence] - messages.ints(batch.prompt_lengths)[sequence],
        "token": messages.ints(batch.token_ids)[source],
        "staleness": batch.step - messages.ints(batch.versions)[source],
        "advantage": messages.floats(batch.advantages)[source],
        "generator_logprob": generator,
        "trainer_logprob": logprobs,
        "ratio": np.exp((logprobs - generator).astype(np.float64)),
    }
    rows = np.empty(len(source), COLUMNS)
    for name, values in columns.items():
        rows[name] = values
    content = io.BytesIO()
    np.save(content, rows)
    folder = output_dir / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{batch.step}-{dist.get_rank()}.npy", content.getvalue())
