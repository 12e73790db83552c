"""A Hugging Face model on Megatron-Core: this rank's shard, its gradients and its optimizer."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.config import RunConfig
from megatron_rl.kernels import heads
from megatron_rl.models import architecture
from megatron_rl.models.divisibility import divisibility_errors
from megatron_rl.models.packing import Rows
from megatron_rl.models.safetensors_directory import read_config
from megatron_rl.trainer import megatron_build, world
from megatron_rl.trainer.batch import MicroBatch
from megatron_rl.trainer.loss import HeadPass, Objective, head_loss
from megatron_rl.trainer.router_replay import Routing
from megatron_rl.trainer.shards import ModelShards, by_weight


class Policy(ModelShards):
    """The trained model: this rank's pipeline stage and its optimizer.

    `forward_backward` computes the gradient of the plain sum of the loss terms over all
    micro-batches and ranks, in every parallel layout. ValueError: a Hugging Face model that is
    incomplete, not implemented, or not divisible by the layout.

    Raises:
        CheckpointError: no Hugging Face model, or an incomplete one.
        ValueError: a model that is not implemented, or not divisible by the layout.
        RuntimeError: a Transformer Engine that cannot be used.
    """

    chunks: Sequence[DistributedDataParallel] = ()

    def __init__(self, run: RunConfig, directory: str | Path) -> None:
        super().__init__(run, architecture(read_config(directory)))
        self.directory = Path(directory)
        if errors := divisibility_errors(run.parallel, self.architecture):
            raise ValueError(errors[0])
        use_te = megatron_build.transformer_engine()
        self.config = megatron_build.transformer_config(run, self.architecture, use_te)
        # The dispatcher of experts needs the same shapes on all ranks.
        whole = run.parallel.context == 1 and not run.parallel.sequence_parallel
        self.shares_prompts = whole and not use_te and not self.architecture.experts
        # Builds or loads the kernels, which fails now rather than in the first pass.
        device, precision = world.device().type, run.precision
        heads.select(precision.logits, precision.logit_grads, self.config.params_dtype, device)
        self.modules = [
            megatron_build.build_module(run, self.architecture, self.config, use_te, i)
            for i in range(run.parallel.virtual_pipeline)
        ]
        """The chunks of this pipeline stage; one, unless the pipeline is a virtual one."""
        self._parameters = by_weight(self.architecture, self.modules, self.experts, use_te)
        self.route(self.modules)
        self.load_huggingface(directory)
        self.chunks = [megatron_build.wrap(run, self.config, module) for module in self.modules]
        self.optimizer = megatron_build.make_optimizer(run, self.config, self.chunks)
        if run.parallel.overlap_grad_reduce:
            # As Megatron's own training loop: a list only for the interleaved schedule.
            syncs = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        self._forward_backward = get_forward_backward_func()

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:  # type: ignore[override]
        """This rank's parameters by `Weight.megatron`, after the gather that `apply` started."""
        for chunk in self.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                if group.param_gather_handle is not None:
                    group.finish_param_sync(skip_next_bucket_dispatch=True)
        return self._parameters

    def forward_backward(
        self,
        micro_batches: list[MicroBatch],
        objective: Objective | None,
        *,
        temperature: float | None = None,
    ) -> None:
        """Run the pipeline schedule over this rank's micro-batches; gradients add up.

        Sets `logprobs_T` and `entropy_T` of each micro-batch on the last pipeline stage. All ranks
        have the same number of micro-batches. Without an objective it is a forward pass alone. The
        default of `temperature`, which divides the logits, is that of generation.
        """
        if objective is not None:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()

        def step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            context = HeadPass(self.run, vocabulary, next(iterator), objective, temperature)
            return forward(model, context, routing=self.routing), _summed

        vocabulary, first = self.architecture.vocabulary, micro_batches[0].tokens_BS
        with torch.set_grad_enabled(objective is not None):
            self._forward_backward(
                forward_step_func=step,
                data_iterator=[iter(micro_batches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(micro_batches),
                seq_length=first.shape[1],
                micro_batch_size=first.shape[0],
                forward_only=objective is None,
            )

    def apply(self, learning_rate: float) -> float:
        """Take one optimizer step; return the global gradient norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        _, norm, _ = self.optimizer.step()
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()
        return float(norm)

    def set_adam(self, beta1: float, beta2: float, eps: float) -> None:
        """Set AdamW's constants."""
        for group in self.optimizer.param_groups:
            group["betas"], group["eps"] = (beta1, beta2), eps


def forward(
    model: Any,
    context: HeadPass,
    *,
    routing: Routing | None = None,
    stock_attention: bool = False,
    padding_BS: Tensor | None = None,
) -> Tensor:
    """Run a chunk of a `GPTModel` over a micro-batch; return its activations, or the summed loss.

    Args:
        model: the chunk, wrapped or not.
        context: the micro-batch, and what the LM head computes from it.
        routing: the model's routers, where they follow the generator's or are compared with them.
        stock_attention: the model has Megatron's own attention, not that of `models.attention`:
            packed rows are then in Megatron's "thd" format, and padded ones need nothing.
        padding_BS: True where the routers' own losses leave a token out.
    """
    micro = context.micro
    rank = parallel_state.get_context_parallel_rank()
    size = parallel_state.get_context_parallel_world_size()
    rows = Rows.of_bounds(micro.bounds, rank, size, world.device(), micro.continues)
    packing: Any = rows
    if stock_attention:
        packing = rows.thd(None, len(micro.tokens_BS)) if len(micro.bounds) > 2 else None
    options: dict[str, Any] = {"output_processor": head_loss, "output_processor_context": context}
    if padding_BS is not None:
        options["padding_mask"] = padding_BS
    following = nullcontext() if routing is None else routing.following(model, micro.experts_RLK)
    with following:
        positions_BS = rows.positions_s.expand_as(micro.tokens_BS)
        output: Tensor = model(
            micro.tokens_BS, positions_BS, None, packed_seq_params=packing, **options
        )
    return output


def _summed(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (loss, number of tokens, logged values): Megatron divides the loss by nothing."""
    return loss, torch.zeros((), dtype=torch.int), {}
