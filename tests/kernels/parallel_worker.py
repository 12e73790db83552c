"""Ranks of test_parallel.py: TP on gloo, against float64 of the whole."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.kernels.fused import linear_logprobs, linear_loss
from tests.kernels.cases import largest, linear_case, relative
from tests.kernels.test_other_losses import clipped, gspo
from tests.sums import sum_error

RANKS = 4


def shard(weight_VH: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return this rank's rows of a head padded to a multiple of the ranks, with large padding."""
    width = -(-len(weight_VH) // size) + 2
    padded = torch.full((width * size, weight_VH.shape[1]), 100.0, dtype=weight_VH.dtype)
    padded[: len(weight_VH)] = weight_VH
    return padded[rank * width : (rank + 1) * width].clone().requires_grad_()


def check(
    group: Any,
    dtype: torch.dtype,
    T: int,
    H: int,
    V: int,
    temperature: float,
    *,
    only_cispo: bool = False,
) -> None:
    rank, size = group.rank(), group.size()
    case = linear_case(T, H, V, dtype, temperature=temperature)
    exact = dtype == torch.float32
    for loss in (case.loss,) if only_cispo else (case.loss, clipped(case), "sequence"):
        hidden_TH = case.hidden_TH.clone().requires_grad_()
        weight_VH: Any = shard(case.weight_VH, rank, size)
        rows = slice(rank * len(weight_VH), (rank + 1) * len(weight_VH))
        main_grad = loss is case.loss and not exact
        if main_grad:
            weight_VH.main_grad = torch.zeros(weight_VH.shape)
        kw: Any = {
            "temperature": temperature,
            "vocabulary": V,
            "group": group,
            "chunk_bytes": 4 * (len(weight_VH) + 128) * 16,
        }
        if loss == "sequence":
            logprobs_T, entropy_T = linear_logprobs(hidden_TH, weight_VH, case.targets_T, **kw)
            total = gspo(case, logprobs_T).sum()
            truth = case.truth_of(lambda logp: gspo(case, logp))
        else:
            scale = {"loss_scale": 1.0} if main_grad else {}
            got = linear_loss(hidden_TH, weight_VH, case.targets_T, loss, **kw, **scale)
            logprobs_T, entropy_T, total = got.logprobs_T, got.entropy_T, got.loss
            truth = case.truth
            if loss is not case.loss:
                truth = case.truth_of(lambda logp: clipped(case)(logp, slice(None)))
        total.backward()
        assert largest(logprobs_T, case.truth.logprobs_T) < 1e-5
        assert largest(entropy_T, case.truth.entropy_T) < 1e-5
        assert truth.loss_error(total) < 1e-6
        whole = torch.zeros(size * len(weight_VH), H, dtype=torch.float64)
        whole[:V] = truth.weight_grad_VH
        weight_grad = weight_VH.main_grad if main_grad else weight_VH.grad
        # Relative to the whole head: a shard can be all padding.
        scale_VH = truth.weight_terms_VH if exact else whole
        tolerance = 2e-6 if exact else 3e-3 if main_grad else 5e-3
        error = sum_error(weight_grad, whole[rows], scale_VH)
        assert error < tolerance, (size, V, error)
        assert (weight_grad[max(V - rows.start, 0) :] == 0).all()
        assert hidden_TH.grad is not None
        if exact:
            assert truth.hidden_error(hidden_TH.grad) < 2e-6
        else:
            assert relative(hidden_TH.grad, truth.hidden_grad_TH) < 5e-3, (size, V)
        same = hidden_TH.grad.clone()
        dist.broadcast(same, dist.get_global_rank(group, 0), group=group)
        assert torch.equal(same, hidden_TH.grad), "ranks disagree on the hidden gradient"


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    everyone = dist.group.WORLD
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    check(everyone, torch.float32, 37, 33, 1003, 0.8)
    check(everyone, torch.bfloat16, 50, 64, 7, 1.0)
    check(pairs[rank // 2], torch.bfloat16, 41, 64, 3001, 1.0)
    check(everyone, torch.bfloat16, 33, 48, 202048, 1.0, only_cispo=True)
    (folder / f"done.{rank}").touch()
    dist.destroy_process_group()
