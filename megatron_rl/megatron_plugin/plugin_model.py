"""The model chunks of a Megatron script, as shards of a Hugging Face model."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.package_info import __version__ as core_version
from megatron.core.utils import unwrap_model
from packaging.version import Version
from torch import Tensor

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.models import architecture
from megatron_rl.models.safetensors_directory import read_config
from megatron_rl.trainer.loss import HeadPass
from megatron_rl.trainer.model import forward
from megatron_rl.trainer.shards import ModelShards, by_weight

ROUTER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
_TRAINING_ONLY = (*ROUTER_LOSSES, "moe_router_load_balancing_type")
"""Fields of the configuration that no generator needs to know."""


def adopt(config: Any) -> None:
    """Set what RL needs in a script's transformer configuration, before the model is wrapped."""
    # Micro-batches differ in shape.
    config.variable_seq_lengths = config.pipeline_model_parallel_size > 1
    if not torch.cuda.is_available():
        # gloo sends asynchronously from a buffer that must not be freed.
        config.deallocate_pipeline_outputs = False


class PluginModel(ModelShards):
    """A model that a Megatron script built; ConfigError if it is not that of `run.model`."""

    def __init__(
        self, run: RunConfig, modules: list[Any], *, use_te: bool, micro_batches: int
    ) -> None:
        self.directory = Path(run.model)
        super().__init__(run, architecture(read_config(self.directory)))
        self.micro_batch_multiple = micro_batches
        for module in modules:
            self._check(module)
        self.architecture.padded_vocabulary = modules[0].vocab_size
        self.parameters = by_weight(self.architecture, modules, self.experts, use_te)
        self.modules = modules
        self.route(modules)
        configs = {id(module.config): module.config for module in modules}.values()
        self._router_losses = [
            (config, name, value)
            for config in configs
            for name in ROUTER_LOSSES
            if torch.tensor(value := getattr(config, name) or 0.0).any()
        ]

    def complete(self, chunks: Sequence[Any]) -> None:
        """Run the all-gather of parameters that Megatron has deferred; collective."""
        for chunk in chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def divide_router_losses(self, tokens: int) -> None:
        """Make the routers' auxiliary and z losses means over the tokens of a step.

        With a loss per token Megatron multiplies each micro-batch's by its tokens, and divides all
        gradients by those of the step; here the loss weights hold that divisor already.
        """
        # 0.18 leaves out the ranks that share a micro-batch. A filtered step may have no tokens.
        ranks = parallel_state.get_tensor_and_context_parallel_group().size()
        scale = (ranks if Version(core_version) < Version("0.19") else 1) / max(tokens, 1)
        for config, name, value in self._router_losses:
            scaled = [v * scale for v in value] if isinstance(value, list) else value * scale
            setattr(config, name, scaled)

    def forward(self, chunk: Any, context: HeadPass) -> Tensor:
        """Run a wrapped chunk over a micro-batch, up to its summed loss."""
        padding_BS = None
        if self._router_losses:
            padding_BS = (context.micro.origin_BS < 0).to(context.micro.tokens_BS.device)
            if self.run.parallel.sequence_parallel and not unwrap_model(chunk).pre_process:
                # Megatron scatters it over the sequence on the first stage only.
                rank = parallel_state.get_tensor_model_parallel_rank()
                padding_BS = padding_BS.chunk(self.run.parallel.tensor, dim=1)[rank]
        return forward(
            chunk, context, routing=self.routing, stock_attention=True, padding_BS=padding_BS
        )

    def check_count(self, count: int, step: int) -> None:
        """Refuse a step that does not fit into Megatron's number of micro-batches.

        Raises:
            ConfigError: names the sizes.
        """
        if count > self.micro_batch_multiple:
            raise ConfigError(
                f"step {step}: its sequences need {count} micro-batches of"
                f" schedule.micro_batch_tokens = {self.run.schedule.micro_batch_tokens} tokens, and"
                " --global-batch-size / (--micro-batch-size x data-parallel size) makes"
                f" {self.micro_batch_multiple}: raise --global-batch-size or the tokens"
            )

    def _check(self, module: Any) -> None:
        """Raise ConfigError, with every field, if a module differs from the directory's model."""
        a, wrong = self.architecture, []
        for name, wanted in a.config_fields().items():
            value = getattr(module.config, name)
            same = math.isclose(value, wanted) if isinstance(wanted, float) else value == wanted
            compared = isinstance(wanted, bool | int | float | str) and name not in _TRAINING_ONLY
            if compared and not same:
                wrong.append(f"{name} is {value!r} and should be {wanted!r}")
        if module.vocab_size < a.vocabulary:
            wrong.append(f"the vocabulary has {module.vocab_size} rows and needs {a.vocabulary}")
        if module.share_embeddings_and_output_weights != a.tied:
            wrong.append(f"tied embeddings should be {a.tied}")
        rotary = getattr(module, "rotary_pos_emb", None)
        if rotary is None:
            wrong.append("position_embedding_type should be 'rope'")
        else:
            wanted_frequencies = a.inverse_frequencies().to(rotary.inv_freq.device)
            if not rotary.inv_freq.float().allclose(wanted_frequencies, rtol=1e-5):
                wrong.append("rotary frequencies differ (--rotary-base, --use-rope-scaling)")
        if wrong:
            raise ConfigError(
                f"Megatron's arguments and {self.directory}/config.json describe two models: "
                + "; ".join(wrong)
                + ". Change the arguments, or give the directory of this model as `model`"
            )
