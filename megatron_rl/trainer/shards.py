"""This rank's share of a model that Megatron has divided over the trainer ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.config import RunConfig
from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Weight
from megatron_rl.trainer.export import ExportPlan
from megatron_rl.trainer.router_replay import Routing


class ModelShards:
    """This rank's share of a model and its data, in the layout that Megatron has set up."""

    modules: Sequence[torch.nn.Module]
    parameters: dict[str, torch.nn.Parameter]
    """By `Weight.megatron`."""
    routing: Routing | None = None
    """This rank's routers; None with `algorithm.routing_replay` none."""
    shares_prompts = False
    """The model's attention lets the completions of a prompt share it (`packing.share`)."""

    def __init__(self, run: RunConfig, architecture: Architecture) -> None:
        self.run, self.architecture = run, architecture
        self.export_plans: dict[tuple[int, torch.dtype | None, bool], ExportPlan] = {}
        """Filled by `export.plan_of`, by its arguments."""
        p = run.parallel
        # The interleaved schedule needs a multiple of the number of stages.
        self.micro_batch_multiple = p.pipeline if p.virtual_pipeline > 1 else 1
        """Pad the number of micro-batches of a step to a multiple of this."""

    def route(self, chunks: Sequence[Any]) -> None:
        """Attach `algorithm.routing_replay` to the routers of these model chunks, as `Routing`."""
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
        """Return (rank, size) of the tensor-parallel group that shards this weight."""
        m = parallel_state
        if weight.expert is None:
            return m.get_tensor_model_parallel_rank(), m.get_tensor_model_parallel_world_size()
        return m.get_expert_tensor_parallel_rank(), m.get_expert_tensor_parallel_world_size()

    @staticmethod
    def add_over_context(values: Tensor) -> Tensor:
        """Return the sum over context-parallel ranks, without gradient."""
        if parallel_state.get_context_parallel_world_size() == 1:
            return values
        total = values.detach().clone()
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total

    @property
    def reports(self) -> bool:
        """True if this rank's outputs count in sums over the world: one rank per token.

        Data-parallel and context-parallel ranks hold different tokens.
        """
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        return first and bool(parallel_state.is_pipeline_last_stage())
