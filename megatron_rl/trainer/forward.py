"""The forward pass of one micro-batch, up to its summed loss."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.models.attention import Rows
from megatron_rl.trainer import world
from megatron_rl.trainer.batch import MicroBatch
from megatron_rl.trainer.head import Head, HeadLoss, HeadRows, head_loss
from megatron_rl.trainer.router_replay import Routing


def forward(
    model: Any,
    batch: MicroBatch,
    head: Head,
    loss: HeadLoss | None,
    temperature: float,
    *,
    routing: Routing | None = None,
    stock_attention: bool = False,
) -> tuple[Tensor, HeadRows]:
    """Runs a chunk of a model over a micro-batch.

    Args:
        model: a chunk of a `GPTModel`, wrapped or not.
        batch: of this rank.
        head: how the LM head computes.
        loss: of the completion tokens; None: log-probs alone.
        temperature: divides the logits.
        routing: the model's routers, where they are to follow or to be compared with the
            generator's.
        stock_attention: the model has Megatron's own attention, not that of `models.specs`: packed
            rows are then in Megatron's "thd" format, and padded ones need nothing.

    Returns:
        What the schedule passes on (the summed loss on the last stage), and what the head found.
    """
    device = world.device()
    rows = HeadRows(
        head=head,
        rows_T=batch.rows_T.to(device),
        targets_T=batch.targets_T.to(device),
        temperature=temperature,
        loss=loss,
    )
    tokens_BS = batch.tokens_BS.to(device)
    where = Rows.of_bounds(
        batch.bounds,
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_context_parallel_world_size(),
        device,
    )
    packing: Any = where
    if stock_attention:
        packing = where.thd(None, len(tokens_BS)) if len(batch.bounds) > 2 else None
    following = nullcontext() if routing is None else routing.following(model, batch.routes_RLK)
    with following:
        output = model(
            tokens_BS,
            where.positions_s.expand_as(tokens_BS),
            None,
            packed_seq_params=packing,
            output_processor=head_loss,
            output_processor_context=rows,
        )
    return output, rows
