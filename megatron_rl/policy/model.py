"""A Hugging Face model on Megatron-Core: shards, gradients buffers, optimizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_rl.config import RunConfig
from megatron_rl.models import architecture, specs
from megatron_rl.models.mapping import (
    Weight,
    local_name,
    padded_vocabulary,
    transformer_engine_name,
)
from megatron_rl.policy import huggingface, world
from megatron_rl.policy.logprobs import RowSelection, response_logprobs
from megatron_rl.policy.microbatch import MicroBatch
from megatron_rl.weights.export import ExportPlan

LossTerm = Callable[[Tensor, Tensor, MicroBatch], Tensor]
"""(log-probs [T] with gradient, entropies [T], micro-batch) -> summed loss of its tokens."""


def _finalize_gradients(
    model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any
) -> None:
    """Reduces the gradients and divides them by nothing: the loss weights hold all divisors."""
    finalize_model_grads(model, None, **kwargs)


class Policy:
    """The trained model: one pipeline stage of it on this rank, and its optimizer.

    The gradient of `forward_backward` is the gradient of the plain sum of the loss terms over all
    micro-batches and ranks, for every parallel layout.

    Args:
        config: `parallel`, `precision`, `optimizer` and `generation.temperature` count.
        directory: Hugging Face model, whose weights are loaded.
    """

    def __init__(self, config: RunConfig, directory: str | Path) -> None:
        self.run = config
        self.directory = Path(directory)
        self.architecture = architecture(huggingface.read_config(directory))
        self.use_te = torch.cuda.is_available() and (
            importlib.util.find_spec("transformer_engine") is not None
        )
        self._check_sizes()
        self.config = TransformerConfig(
            **self.architecture.config_fields(), **self._machine_fields()
        )
        self.module = self._build()
        self.parameters = self._parameters_by_weight()
        self.load_huggingface(directory)
        self.chunk = self._wrap()
        self.optimizer = self._make_optimizer()
        self._forward_backward = get_forward_backward_func()
        self.export_plans: dict[int, ExportPlan] = {}

    # ------------------------------------------------------------ building

    def _check_sizes(self) -> None:
        p, a = self.run.parallel, self.architecture
        for key, size, what, count in (
            ("parallel.tensor", p.tensor, "key-value heads", a.groups),
            ("parallel.tensor", p.tensor, "attention heads", a.heads),
            ("parallel.pipeline", p.pipeline, "layers", a.layers),
            ("parallel.expert", p.expert, "experts", a.experts),
        ):
            even = count % size == 0 if what != "layers" else count >= size
            if not even:
                raise ValueError(
                    f"{key} is {size}: the model in {self.directory} has {count} {what}, which"
                    " cannot be divided so; choose a smaller size"
                )

    def _machine_fields(self) -> dict[str, Any]:
        p, cuda = self.run.parallel, torch.cuda.is_available()
        dtype = torch.bfloat16 if self.run.precision.params == "bf16" else torch.float32
        layers, stages = self.architecture.layers, p.pipeline
        # Stages before the last take the larger share: the last one has the head as well.
        first = -(-layers // stages)
        uneven = {} if layers % stages == 0 else {"num_layers_in_first_pipeline_stage": first}
        if uneven and (layers - first) % (stages - 1):
            raise ValueError(
                f"parallel.pipeline is {stages}: {layers} layers cannot be divided into a first"
                f" stage of {first} and {stages - 1} equal ones; choose another size"
            )
        return {
            **uneven,
            "bf16": dtype == torch.bfloat16,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "tensor_model_parallel_size": p.tensor,
            "pipeline_model_parallel_size": p.pipeline,
            "expert_model_parallel_size": p.expert,
            "expert_tensor_parallel_size": p.expert_tensor,
            "sequence_parallel": p.sequence_parallel,
            "calculate_per_token_loss": True,
            "finalize_model_grads_func": _finalize_gradients,
            # Micro-batches have shapes of their own.
            "variable_seq_lengths": p.pipeline > 1,
            # gloo sends asynchronously from a buffer that deallocation would take away.
            "deallocate_pipeline_outputs": cuda,
            "perform_initialization": False,
            "attention_softmax_in_fp32": True,
            "gradient_accumulation_fusion": self.use_te,
            "apply_rope_fusion": self.use_te,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": cuda,
            "bias_dropout_fusion": False,
            "persist_layer_norm": False,
            "moe_grouped_gemm": self.use_te,
            "moe_token_dispatcher_type": "alltoall",
        }

    def _build(self) -> GPTModel:
        arch, stage = self.architecture, parallel_state.get_pipeline_model_parallel_rank()
        self.layer_offset = get_transformer_layer_offset(self.config, pp_rank=stage)
        last = parallel_state.get_pipeline_model_parallel_world_size() - 1
        count = get_num_layers_to_build(self.config, pp_rank=stage)
        own = arch.layer_specs(self.use_te)[self.layer_offset : self.layer_offset + count]
        model = GPTModel(
            self.config,
            TransformerBlockSubmodules(layer_specs=own, layer_norm=specs.final_norm(self.use_te)),
            padded_vocabulary(arch.vocabulary, self.run.parallel.tensor),
            arch.positions,
            pre_process=stage == 0,
            post_process=stage == last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=arch.tied,
        )
        model.rotary_pos_emb.inv_freq = arch.inverse_frequencies().to(world.device())
        return model

    def _parameters_by_weight(self) -> dict[str, torch.nn.Parameter]:
        """Parameters of this rank by the global name of their `Weight`."""
        own = dict(self.module.named_parameters())
        experts = self.architecture.experts // self.run.parallel.expert
        first = experts * parallel_state.get_expert_model_parallel_rank()
        out: dict[str, torch.nn.Parameter] = {}
        for weight in self.architecture.weights():
            if weight.expert is not None and not first <= weight.expert < first + experts:
                continue
            name = self._name_here(weight, first)
            if name in own:
                out[weight.megatron] = own.pop(name)
        if own:
            raise RuntimeError(
                f"{type(self.architecture).__name__} maps no Hugging Face tensor to"
                f" {', '.join(sorted(own))}: add them to its weights()"
            )
        return out

    def _name_here(self, weight: Weight, first_expert: int) -> str:
        """The name that a parameter has on this rank: layers and experts count from 0."""
        name = weight.megatron
        if weight.expert is not None:
            own = weight.expert - first_expert
            name = name.replace(f".local_experts.{weight.expert}.", f".local_experts.{own}.")
        name = transformer_engine_name(name) if self.use_te else local_name(name)
        if name.startswith("decoder.layers."):
            _, _, layer, rest = name.split(".", 3)
            name = f"decoder.layers.{int(layer) - self.layer_offset}.{rest}"
        return name

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
                rank, size = self.split_rank(weight)
                shard = weight.split.cut(full, rank, size)
                if shard.shape != param.shape:
                    raise ValueError(
                        f"{weight.megatron} has shape {tuple(param.shape)} on this rank, and"
                        f" {' + '.join(weight.hf)} in {directory} gives {tuple(shard.shape)}"
                    )
                param.copy_(shard)

    def _wrap(self) -> DistributedDataParallel:
        module: torch.nn.Module = self.module.to(world.device())
        if self.config.bf16:
            module = Float16Module(self.config, module)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=self.distributed_optimizer
        )
        return DistributedDataParallel(self.config, ddp, module)

    @property
    def distributed_optimizer(self) -> bool:
        """Whether optimizer state is sharded: asked for, and there is somebody to share with."""
        return self.run.parallel.distributed_optimizer and self.run.data_parallel > 1

    def _make_optimizer(self) -> Any:
        o = self.run.optimizer
        optimizer = OptimizerConfig(
            optimizer="adam",
            lr=o.learning_rate,
            weight_decay=o.weight_decay,
            adam_beta1=o.beta1,
            adam_beta2=o.beta2,
            adam_eps=o.eps,
            clip_grad=o.clip_grad_norm,
            bf16=self.config.bf16,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=self.distributed_optimizer,
        )
        made = get_megatron_optimizer(optimizer, [self.chunk])
        self.config.grad_scale_func = made.scale_loss
        if not torch.cuda.is_available():
            for group in made.param_groups:
                group["fused"] = True  # one call for all parameters; Megatron does not ask for it
        return made

    # ------------------------------------------------------------ use

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
        if not forward_only:
            self.chunk.zero_grad_buffer()
            self.optimizer.zero_grad()

        def step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            batch = next(iterator)
            rows = RowSelection(
                rows_T=batch.rows_T.to(world.device()),
                targets_T=batch.targets_T.to(world.device()),
                temperature=temperature or self.run.generation.temperature,
                vocabulary=self.architecture.vocabulary,
                fp32_logits=self.run.precision.logits == "fp32",
                tp_group=parallel_state.get_tensor_model_parallel_group(),
                sequence_parallel=self.run.parallel.sequence_parallel,
            )
            tokens_BS = batch.tokens_BS.to(world.device())
            positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
            output = model(
                tokens_BS,
                positions_S.expand_as(tokens_BS),
                None,
                output_processor=response_logprobs,
                output_processor_context=rows,
            )

            def loss(logprobs_T: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                assert rows.entropy_T is not None
                found.append((logprobs_T.detach(), rows.entropy_T))
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
