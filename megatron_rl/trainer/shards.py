"""A model that Megatron has divided over the trainer ranks: what this rank holds of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.config import RunConfig
from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Weight
from megatron_rl.trainer.router_replay import Routing
from megatron_rl.weights.export import ExportPlan, PlanKey


class ModelShards:
    """This rank's part of a model and of a batch, in the parallel layout that Megatron has set up.

    Args:
        run: `parallel` and `schedule` count.
        architecture: of the model.
    """

    parameters: dict[str, torch.nn.Parameter]
    """This rank's parameters by `Weight.megatron`."""
    routing: Routing | None = None
    """This rank's routers; None with `algorithm.routing_replay` none."""

    def __init__(self, run: RunConfig, architecture: Architecture) -> None:
        self.run, self.architecture = run, architecture
        self.export_plans: dict[PlanKey, ExportPlan] = {}

    def route(self, chunks: Sequence[Any]) -> None:
        """Has the routers of these model chunks do as `algorithm.routing_replay` says.

        Raises:
            ValueError: a model whose routers cannot.
        """
        mode = self.run.algorithm.routing_replay
        if mode != "none":
            self.routing = Routing(chunks, self.architecture, mode)

    @property
    def experts(self) -> range:
        """Global numbers of the routed experts on this rank."""
        count = self.architecture.experts // self.run.parallel.expert
        first = count * parallel_state.get_expert_model_parallel_rank()
        return range(first, first + count)

    def split_rank(self, weight: Weight) -> tuple[int, int]:
        """(rank, size) of the tensor-parallel group that shards this weight, expert or dense."""
        if weight.expert is None:
            return (
                parallel_state.get_tensor_model_parallel_rank(),
                parallel_state.get_tensor_model_parallel_world_size(),
            )
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of micro-batches of a step is a multiple of."""
        p = self.run.parallel
        # The interleaved schedule goes round the stages with as many micro-batches.
        return p.pipeline if p.virtual_pipeline > 1 else 1

    @staticmethod
    def add_over_context(values: Tensor) -> Tensor:
        """The sum over the ranks that hold other tokens of the same sequences; no gradient."""
        if parallel_state.get_context_parallel_world_size() == 1:
            return values
        total = values.detach().clone()
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total

    @property
    def reports(self) -> bool:
        """Whether this rank's outputs count in sums over the world: one rank per token.

        Data-parallel and context-parallel ranks have tokens of their own.
        """
        return (
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.is_pipeline_last_stage() is True
        )
