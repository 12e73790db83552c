"""The loss over the LM head, in Megatron's output hook, and the way it is computed.

    row kernel   CISPO: coefficients in the row kernel; three products
    one pass     every other loss of single tokens; three products
    two passes   losses with sums over a sequence: log-probs first; four products
    plain        the logits of all rows and autograd: for the entropy's gradient, and where
                 `kernels.head` asks for it

All but `plain` go chunk by chunk through `megatron_rl.kernels`. The head's gradient is in main_grad
before the backward pass begins: the gradient that reaches the summed loss is 1 (Megatron divides a
per-token loss by nothing, `build`), DDP reduces a bucket no earlier than after the backward pass of
its last parameter, and Megatron's schedules run each forward pass of the last stage once.

Shape legend: S positions, B sequences, H hidden, T selected rows, C rows of a chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_rl.config import RunConfig
from megatron_rl.kernels.fused import Settings, linear_logprobs, linear_loss
from megatron_rl.kernels.heads import LogitGrads, Precision
from megatron_rl.kernels.linear import Cispo
from megatron_rl.kernels.lm_head import fp32_linear
from megatron_rl.trainer.logprobs import vocabulary_parallel_logprobs

log = logging.getLogger(__name__)

Way = Literal["row kernel", "one pass", "two passes", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoss:
    """The loss of a micro-batch as a function of its log-probs; the sum of the terms is trained.

    Example: cross-entropy is `HeadLoss(terms=lambda logprobs_C, entropy_C, place: -logprobs_C)`.
    """

    terms: Callable[[Tensor, Tensor | None, slice], Tensor]
    """(log-probs [C] with gradient, entropies [C], their place in T) -> loss terms [C]. Entropies
    are there where `entropy_gradient` asks for them, else None."""
    per_token: bool = True
    """Whether a term follows from its own log-prob alone; else `terms` gets all T at once."""
    entropy_gradient: bool = False
    """Whether the terms differentiate the entropies."""
    cispo: Cispo | None = None
    """Inputs of the row kernel, where the terms are CISPO's and nothing else."""

    def way(self, head: Literal["fused", "plain"]) -> Way:
        """How it is computed: the one place that decides."""
        if head == "plain" or self.entropy_gradient:
            return "plain"
        if not self.per_token:
            return "two passes"
        return "one pass" if self.cispo is None else "row kernel"


@dataclass(frozen=True, slots=True)
class Head:
    """What stays the same over a run."""

    kind: Literal["fused", "plain"]
    precision: Precision
    logit_grads: LogitGrads
    chunk_bytes: int | None
    vocabulary: int
    """Rows of the whole head that are real tokens; later ones are padding."""
    group: dist.ProcessGroup
    """Tensor-parallel."""
    sequence_parallel: bool

    @classmethod
    def of(cls, run: RunConfig, vocabulary: int) -> Head:
        """The head that a run's configuration asks for, in the Megatron world of this process."""
        chunk_mib = run.kernels.chunk_mib
        return cls(
            kind=run.kernels.head,
            precision=run.precision.logits,
            logit_grads=run.precision.logit_grads,
            chunk_bytes=None if chunk_mib is None else int(chunk_mib * 2**20),
            vocabulary=vocabulary,
            group=parallel_state.get_tensor_model_parallel_group(),
            sequence_parallel=run.parallel.sequence_parallel,
        )


@dataclass(slots=True)
class HeadRows:
    """What the hook is asked for in one micro-batch, and what it found."""

    head: Head
    rows_T: Tensor
    """Row of [S * B] that predicts each token: `(position - 1) * B + sequence`."""
    targets_T: Tensor
    """Token ids."""
    temperature: float
    loss: HeadLoss | None
    """None: log-probs alone, without gradient."""
    logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    """Entropy of each row's distribution in nats. Neither has a gradient."""

    @property
    def found(self) -> tuple[Tensor, Tensor]:
        """(log-probs [T], entropies [T]) of a pass that is done."""
        assert self.logprobs_T is not None
        assert self.entropy_T is not None
        return self.logprobs_T.detach(), self.entropy_T.detach()


@cache
def _say(way: Way, kind: str) -> None:
    asked = " (kernels.head)" if kind == "plain" else ""
    log.info("loss over the LM head: %s%s", way, asked)


def head_loss(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: HeadRows,
    **_: Any,
) -> Tensor:
    """Megatron's `output_processor`: the summed loss of the tokens that `context` names.

    Args:
        hidden_states: [S, B, H], or this rank's part of S under sequence parallelism.
        output_layer: the LM head; its weight [V, H] unless `output_weight` (tied) is given.
        context: the rows; its `logprobs_T` and `entropy_T` are set.

    Returns:
        The loss, a scalar with gradient; without a loss, the sum of the log-probs.
    """
    head, loss = context.head, context.loss
    if loss is None:
        plain, way = head.kind == "plain", None
    else:
        way = loss.way(head.kind)
        plain = way == "plain"
        _say(way, head.kind)
    hidden_SBH = hidden_states
    if head.sequence_parallel:
        # The kernels have summed the gradient over the vocabulary's shards; autograd has not.
        hidden_SBH = gather_from_sequence_parallel_region(
            hidden_SBH, tensor_parallel_output_grad=plain, group=head.group
        )
    hidden_TH = hidden_SBH.flatten(0, 1).index_select(0, context.rows_T)
    weight_VH = output_layer.weight if output_weight is None else output_weight
    if plain:
        return _plain(hidden_TH, weight_VH, context)
    settings = Settings(
        temperature=context.temperature,
        vocabulary=head.vocabulary,
        group=head.group,
        precision=head.precision,
        logit_grads=head.logit_grads,
        chunk_bytes=head.chunk_bytes,
    )
    operands = (hidden_TH, weight_VH, context.targets_T)
    if loss is None or way == "two passes":
        logprobs_T, context.entropy_T = linear_logprobs(*operands, **settings)
        context.logprobs_T = logprobs_T
        return (logprobs_T if loss is None else loss.terms(logprobs_T, None, slice(None))).sum()
    terms = loss.terms
    done = linear_loss(
        *operands,
        loss.cispo or (lambda logprobs_C, place: terms(logprobs_C, None, place)),
        loss_scale=1.0,
        **settings,
    )
    context.logprobs_T, context.entropy_T = done.logprobs_T, done.entropy_T
    return done.loss


def _plain(hidden_TH: Tensor, weight_VH: Tensor, context: HeadRows) -> Tensor:
    head, loss = context.head, context.loss
    if not head.sequence_parallel and head.group.size() > 1 and len(hidden_TH):
        hidden_TH = copy_to_tensor_model_parallel_region(hidden_TH, group=head.group)
    logprobs_T, entropy_T = vocabulary_parallel_logprobs(
        fp32_linear(hidden_TH, weight_VH, head.precision, head.logit_grads),
        context.targets_T,
        context.temperature,
        head.vocabulary,
        head.group,
        loss is not None and loss.entropy_gradient,
    )
    context.logprobs_T, context.entropy_T = logprobs_T, entropy_T
    if loss is None:
        return logprobs_T.sum()
    entropy = entropy_T if loss.entropy_gradient else None
    return loss.terms(logprobs_T, entropy, slice(None)).sum()
