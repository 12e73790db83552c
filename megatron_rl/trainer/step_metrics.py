"""Metrics of one step, as sums that add up over micro-batches and ranks.

Means are over the trained tokens (loss weight > 0: sampled completion tokens of used sequences).
Shape legend: T completion tokens of this rank.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import messages
from megatron_rl.files import replace_file
from megatron_rl.trainer import world
from megatron_rl.trainer.batch import MicroBatch, completion_positions
from megatron_rl.trainer.loss import Objective
from megatron_rl.trainer.router_replay import COUNTS
from megatron_rl.trainer.shards import ModelShards

TOKEN_SUMS = (
    *("loss", "tokens", "ratio", "ratio_squared", "clipped", "outside", "kl", "entropy"),
    *("same_error", "same_tokens", "corrected", "reference_kl"),
)
SUMS = (*TOKEN_SUMS, *COUNTS)
NEAR_ONE = (0.9, 1.1)
_WHOLE = ("step", "prompt_id", "completion", "position", "token", "staleness")
_REAL = ("advantage", "generator_logprob", "trainer_logprob", "ratio")
COLUMNS = np.dtype([*((name, "<i4") for name in _WHOLE), *((name, "<f4") for name in _REAL)])
"""Columns of the trained tokens of a step in `metrics.token_dump_steps`, 40 bytes per token;
`position` counts from the start of the completion, forced tokens included."""


def report(
    batch: messages.Batch,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    shards: ModelShards,
) -> tuple[dict[str, float], list[list[float]]]:
    """Return metrics of the whole batch and the probe's log-probs, the same on every rank.

    Collective over the trainer ranks, after the forward pass of all micro-batches. In steps of
    `metrics.token_dump_steps` each rank that reports writes its tokens.
    """
    folder, dumped = shards.run.output_dir, batch.step in shards.run.metrics.token_dump_steps
    if dumped and dist.get_rank() == 0:
        # Of an interrupted run; before the others write: they wait in the sums.
        for path in folder.glob(f"tokens/{batch.step}-*.npy"):
            path.unlink()
    positions = [completion_positions(batch, i) for i in batch.probe]
    probe_positions = np.concatenate([np.zeros(0, dtype=np.int64), *positions])
    probe = torch.zeros(len(probe_positions), dtype=torch.float64)
    sums = torch.zeros(len(SUMS), dtype=torch.float64)
    maxima = torch.full((3,), -torch.inf, dtype=torch.float64)
    if shards.reports:
        sums[: len(TOKEN_SUMS)], maxima = _local_sums(micro_batches, objective)
        if len(probe):
            by_position = torch.zeros(int(messages.ints(batch.bounds)[-1]), dtype=torch.float64)
            source_T = torch.cat([micro.source_T for micro in micro_batches])
            by_position[source_T] = joined(micro_batches, "logprobs_T").double()
            probe = by_position[torch.from_numpy(probe_positions)]
    if shards.routing is not None:
        sums[len(TOKEN_SUMS) :] = shards.routing.take_counts()
    group, flat = world.control_group(), torch.cat([sums, probe])
    dist.all_reduce(flat, group=group)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    if dumped and shards.reports:
        _write_tokens(folder, batch, micro_batches)
    sums, probe = flat.tensor_split([len(sums)])
    metrics = _named(sums, maxima)
    if shards.routing is None:
        del metrics["routes_differing_fraction"], metrics["routes_differing_live_fraction"]
    algorithm = objective.algorithm
    if algorithm.correction.kind == "none":
        del metrics["corrected_fraction"]
    if not algorithm.kl_coefficient:
        del metrics["kl_reference"]
    return metrics, [part.tolist() for part in probe.split([len(p) for p in positions])]


def joined(micro_batches: Sequence[MicroBatch], name: str) -> Tensor:
    """Return an array of the tokens of all micro-batches, on the CPU."""
    return torch.cat([getattr(micro, name) for micro in micro_batches]).cpu()


def _local_sums(micro_batches: Sequence[MicroBatch], objective: Objective) -> tuple[Tensor, Tensor]:
    """Return this rank's (sums by `TOKEN_SUMS`, maxima [ratio, -ratio, error]), fp64."""
    logprobs_T = joined(micro_batches, "logprobs_T")
    trained_T = joined(micro_batches, "loss_weights_T") > 0
    difference_T = (logprobs_T - joined(micro_batches, "generator_logprobs_T")).double()
    log_ratio = difference_T[trained_T]
    ratio = log_ratio.exp()
    outside = (ratio < NEAR_ONE[0]) | (ratio > NEAR_ONE[1])
    same_error = difference_T[joined(micro_batches, "same_version_T")].abs()
    parts = [objective.sums(micro) for micro in micro_batches]
    loss, clipped, corrected, reference_kl = (
        sum(float(getattr(part, name)) for part in parts)
        for name in ("loss", "clipped", "corrected", "reference_kl")
    )
    # k3 of KL(gen || train): E_gen[rho - 1 - log rho], never negative.
    kl = (ratio - 1 - log_ratio).sum()
    entropy = joined(micro_batches, "entropy_T")[trained_T].double().sum()
    sums = [
        *(loss, len(ratio), ratio.sum(), ratio.square().sum(), clipped, outside.sum(), kl, entropy),
        *(same_error.sum(), len(same_error), corrected, reference_kl),
    ]
    maxima = [x.max() if len(x) else -torch.inf for x in (ratio, -ratio, same_error)]
    out = [torch.tensor([float(x) for x in xs], dtype=torch.float64) for xs in (sums, maxima)]
    return out[0], out[1]


def _named(sums: Tensor, maxima: Tensor) -> dict[str, float]:
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    # Without any token there is no maximum: 0.
    ratio_max, minus_ratio_min, same_max = maxima.where(maxima != -torch.inf, 0.0).tolist()
    n, same, routes = (max(total[key], 1.0) for key in ("tokens", "same_tokens", "routes"))
    mean = total["ratio"] / n
    return {
        "loss": total["loss"],
        "ratio_mean": mean,
        "ratio_max": ratio_max,
        "ratio_min": abs(minus_ratio_min),
        "ratio_std": max(total["ratio_squared"] / n - mean**2, 0.0) ** 0.5,
        "clipped_fraction": total["clipped"] / n,
        "corrected_fraction": total["corrected"] / n,
        "kl_reference": total["reference_kl"] / n,
        "ratio_outside_0.9_1.1": total["outside"] / n,
        "mismatch_kl": total["kl"] / n,
        "entropy": total["entropy"] / n,
        "tokens_trained": total["tokens"],
        "same_version_logprob_error_max": same_max,
        "same_version_logprob_error_mean": total["same_error"] / same,
        "same_version_logprob_tokens": total["same_tokens"],
        "routes_differing_fraction": total["routes_differing"] / routes,
        "routes_differing_live_fraction": total["routes_differing_live"] / routes,
    }


def _write_tokens(folder: Path, batch: messages.Batch, micros: Sequence[MicroBatch]) -> None:
    """Write the trained ones of this rank's completion tokens: `tokens/<step>-<rank>.npy`."""
    trained = joined(micros, "loss_weights_T") > 0
    names = ("source", "targets", "versions", "advantages", "generator_logprobs", "logprobs")
    source, tokens, versions, *real = (joined(micros, f"{x}_T")[trained].numpy() for x in names)
    sequence = np.searchsorted(messages.ints(batch.bounds), source, side="right") - 1
    starts = messages.ints(batch.bounds)[:-1] + messages.ints(batch.prompt_lengths)
    rows = np.empty(len(source), COLUMNS)
    rows["step"] = batch.step
    rows["prompt_id"] = messages.ints(batch.prompt_ids)[sequence]
    rows["completion"] = messages.ints(batch.completion_indices)[sequence]
    rows["position"] = source - starts[sequence]
    rows["token"], rows["staleness"] = tokens, batch.step - versions
    rows["advantage"], rows["generator_logprob"], rows["trainer_logprob"] = real
    difference = rows["trainer_logprob"] - rows["generator_logprob"]
    rows["ratio"] = np.exp(difference.astype(np.float64))
    np.save(content := io.BytesIO(), rows)
    (folder / "tokens").mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"tokens/{batch.step}-{dist.get_rank()}.npy", content.getvalue())
