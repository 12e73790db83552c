"""A Hugging Face model on Megatron-Core: this rank's shard of it, its gradients, its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.config import RunConfig
from megatron_rl.models import architecture
from megatron_rl.models.mapping import Weight, local_name, transformer_engine_name
from megatron_rl.policy import build, huggingface, world
from megatron_rl.policy.logprobs import RowSelection, response_logprobs
from megatron_rl.policy.microbatch import MicroBatch
from megatron_rl.weights.export import ExportPlan

LossTerm = Callable[[Tensor, Tensor, MicroBatch], Tensor]
"""(log-probs [T] with gradient, entropies [T], micro-batch) -> summed loss of its tokens."""


class Policy:
    """The trained model: one pipeline stage of it on this rank, and its optimizer.

    The gradient of `forward_backward` is the gradient of the plain sum of the loss terms over all
    micro-batches and ranks, in every parallel layout.

    Args:
        run: `parallel`, `precision`, `optimizer` and `generation.temperature` count.
        directory: Hugging Face model, whose weights are loaded.

    Raises:
        FileNotFoundError: no Hugging Face model.
        ValueError: a model that is not implemented, or that the layout cannot divide.
    """

    def __init__(self, run: RunConfig, directory: str | Path) -> None:
        self.run = run
        self.directory = Path(directory)
        self.architecture = architecture(huggingface.read_config(directory))
        build.check_sizes(run, self.architecture)
        use_te = build.transformer_engine()
        self.config = build.transformer_config(run, self.architecture, use_te)
        self.module = build.build_module(run, self.architecture, self.config, use_te)
        self.parameters = self._parameters_by_weight(use_te)
        """This rank's parameters by `Weight.megatron`."""
        self.load_huggingface(directory)
        self.chunk = build.wrap(run, self.config, self.module)
        self.optimizer = build.make_optimizer(run, self.config, self.chunk)
        self.export_plans: dict[int, ExportPlan] = {}
        self._forward_backward = get_forward_backward_func()

    def _parameters_by_weight(self, use_te: bool) -> dict[str, torch.nn.Parameter]:
        own = dict(self.module.named_parameters())
        experts = self.architecture.experts // self.run.parallel.expert
        first_expert = experts * parallel_state.get_expert_model_parallel_rank()
        first_layer = build.first_layer(self.config)
        out: dict[str, torch.nn.Parameter] = {}
        for weight in self.architecture.weights():
            name = weight.megatron
            if weight.expert is not None:
                local = weight.expert - first_expert
                if not 0 <= local < experts:
                    continue
                name = name.replace(f".local_experts.{weight.expert}.", f".local_experts.{local}.")
            name = transformer_engine_name(name) if use_te else local_name(name)
            if name.startswith("decoder.layers."):
                _, _, layer, rest = name.split(".", 3)
                name = f"decoder.layers.{int(layer) - first_layer}.{rest}"
            if name in own:
                out[weight.megatron] = own.pop(name)
        if own:
            raise RuntimeError(
                f"{type(self.architecture).__name__} maps no Hugging Face tensor to"
                f" {', '.join(sorted(own))}: add them to its weights()"
            )
        return out

    def load_huggingface(self, directory: str | Path) -> None:
        """Copies this rank's shards from a Hugging Face directory into the parameters.

        Raises:
            ValueError: names or shapes that differ from the architecture's.
        """
        weights = self.architecture.weights()
        expected = {name for w in weights for name in w.hf}
        with huggingface.TensorReader(directory) as reader, torch.no_grad():
            if reader.names() != expected:
                missing, extra = expected - reader.names(), reader.names() - expected
                raise ValueError(
                    f"{directory} does not hold the tensors of its config.json: missing"
                    f" {sorted(missing)[:5]}, unknown {sorted(extra)[:5]}"
                )
            for weight in weights:
                param = self.parameters.get(weight.megatron)
                if param is None:
                    continue
                full = weight.pack.join([reader.get(n, weight.index) for n in weight.hf])
                shard = weight.split.cut(full, *self.split_rank(weight))
                if shard.shape != param.shape:
                    raise ValueError(
                        f"{weight.megatron} has shape {tuple(param.shape)} on this rank, and"
                        f" {' + '.join(weight.hf)} in {directory} gives {tuple(shard.shape)}"
                    )
                param.copy_(shard)

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
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size) over which a batch is divided."""
        return (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )

    @property
    def row_multiple(self) -> int:
        """What the padded length of a micro-batch must be a multiple of."""
        return self.run.parallel.tensor if self.run.parallel.sequence_parallel else 1

    @property
    def reports(self) -> bool:
        """Whether this rank's outputs count in sums over the world: one rank per data shard."""
        return (
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.is_pipeline_last_stage() is True
        )

    def forward_backward(
        self,
        batches: list[MicroBatch],
        term: LossTerm,
        *,
        temperature: float | None = None,
        forward_only: bool = False,
    ) -> list[tuple[Tensor, Tensor]]:
        """Runs the pipeline schedule over this rank's micro-batches; gradients add up.

        Args:
            batches: of this data-parallel rank; their number is the same on all ranks.
            term: the summed loss of a micro-batch's tokens.
            temperature: divides the logits; None: that of generation.
            forward_only: no gradients.

        Returns:
            (log-probs [T], entropies [T]) of each micro-batch on the last stage; [] elsewhere.
        """
        found: list[tuple[Tensor, Tensor]] = []
        device = world.device()
        if not forward_only:
            self.chunk.zero_grad_buffer()
            self.optimizer.zero_grad()

        def step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            batch = next(iterator)
            rows = RowSelection(
                rows_T=batch.rows_T.to(device),
                targets_T=batch.targets_T.to(device),
                temperature=temperature or self.run.generation.temperature,
                vocabulary=self.architecture.vocabulary,
                fp32_logits=self.run.precision.logits == "fp32",
                tp_group=parallel_state.get_tensor_model_parallel_group(),
                sequence_parallel=self.run.parallel.sequence_parallel,
                entropy_gradient=self.run.algorithm.entropy_coefficient != 0.0,
            )
            tokens_BS = batch.tokens_BS.to(device)
            output = model(
                tokens_BS,
                torch.arange(tokens_BS.shape[1], device=device).expand_as(tokens_BS),
                None,
                output_processor=response_logprobs,
                output_processor_context=rows,
            )

            def loss(logprobs_T: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                assert rows.entropy_T is not None
                found.append((logprobs_T.detach(), rows.entropy_T.detach()))
                summed = term(logprobs_T, rows.entropy_T, batch)
                return summed, torch.zeros((), dtype=torch.int), {}

            return output, loss

        first = batches[0].tokens_BS
        self._forward_backward(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=self.chunk,
            num_microbatches=len(batches),
            seq_length=first.shape[1],
            micro_batch_size=first.shape[0],
            forward_only=forward_only,
        )
        return found

    def apply(self, learning_rate: float) -> float:
        """One optimizer step with the gradients that are there.

        Returns:
            The global gradient norm before clipping.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        _, norm, _ = self.optimizer.step()
        return float(norm)

    def set_adam(self, beta1: float, beta2: float, eps: float) -> None:
        """Changes AdamW's constants."""
        for group in self.optimizer.param_groups:
            group["betas"], group["eps"] = (beta1, beta2), eps
