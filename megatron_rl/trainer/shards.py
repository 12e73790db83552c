"""This rank's share of a model that Megatron has divided over the trainer ranks."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.config import RunConfig
from megatron_rl.models.base import Architecture
from megatron_rl.models.mapping import Weight
from megatron_rl.models.safetensors_directory import SafetensorsDirectory
from megatron_rl.trainer.export import ExportPlan
from megatron_rl.trainer.router_replay import Routing

_log = logging.getLogger(__name__)


class ModelShards:
    """This rank's share of a model and its data, in the layout that Megatron has set up."""

    modules: Sequence[torch.nn.Module]
    parameters: dict[str, torch.nn.Parameter]
    routing: Routing | None = None  # this rank's routers; None with `algorithm.routing_replay` none
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
        """Attach `algorithm.routing_replay` to the routers of these model chunks, as `Routing`.

        Raises:
            ValueError: a model whose routers do not support it.
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
        """Return (rank, size) of the tensor-parallel group that shards this weight."""
        m = parallel_state
        if weight.expert is None:
            return m.get_tensor_model_parallel_rank(), m.get_tensor_model_parallel_world_size()
        return m.get_expert_tensor_parallel_rank(), m.get_expert_tensor_parallel_world_size()

    @torch.no_grad()
    def load_huggingface(self, directory: str | Path) -> None:
        """Copy this rank's shards from a Hugging Face directory, one parameter at a time."""
        source, parameters = SafetensorsDirectory(directory), self.parameters
        leftovers = source.check(self.architecture)
        if leftovers and dist.get_rank() == 0:
            _log.warning(
                f"{directory} has {len(leftovers)} tensors that the model does not have, left by"
                f" the tool that wrote it ({', '.join(sorted(leftovers)[:3])}): they are ignored"
            )
        own = [w for w in self.architecture.weights() if w.megatron in parameters]
        # In file order: ranks of a node read the same file at about the same time.
        for weight in sorted(own, key=lambda w: max(source.file_of[name] for name in w.hf)):
            param = parameters[weight.megatron]
            shard = weight.split.shard(source.parameter(weight), *self.split_rank(weight))
            if shard.shape != param.shape:
                raise ValueError(
                    f"{weight.megatron} has shape {tuple(param.shape)} on this rank, and"
                    f" {' + '.join(weight.hf)} in {directory} gives {tuple(shard.shape)}"
                )
            param.copy_(shard)

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
        """True if this rank's outputs count in sums over the world: one rank per token."""
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        return first and bool(parallel_state.is_pipeline_last_stage())


def by_weight(
    architecture: Architecture, modules: Sequence[torch.nn.Module], experts: range, use_te: bool
) -> dict[str, torch.nn.Parameter]:
    """Return this rank's parameters by `Weight.megatron`, in the order of the forward pass.

    `modules` are all chunks of this rank, each with consecutive layers, of the Transformer Engine
    spec with `use_te`; `experts` the global numbers of the routed experts on this rank.

    Raises:
        RuntimeError: a parameter that the architecture maps to no Hugging Face tensor.
    """
    chunks = []
    for module in modules:
        first_layer = next((layer.layer_number - 1 for layer in module.decoder.layers), 0)
        chunks.append((first_layer, dict(module.named_parameters())))
    out: dict[str, torch.nn.Parameter] = {}
    for weight in architecture.weights():
        if weight.expert is not None and weight.expert not in experts:
            continue
        for first_layer, named in chunks:
            name = weight.parameter(use_te, first_layer, experts.start)
            if name in named:
                out[weight.megatron] = named.pop(name)
    if left := sorted(name for _, named in chunks for name in named):
        raise RuntimeError(
            f"{type(architecture).__name__} maps no Hugging Face tensor to {', '.join(left)}: add"
            " them to its weights()"
        )
    return out
