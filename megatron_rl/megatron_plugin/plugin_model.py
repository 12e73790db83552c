"""The model chunks of a Megatron script, as shards of a Hugging Face model."""

from pathlib import Path
from typing import Any

from megatron.core.utils import unwrap_model

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.megatron_plugin import arguments
from megatron_rl.models import architecture
from megatron_rl.models.safetensors_directory import read_config
from megatron_rl.trainer import parameters
from megatron_rl.trainer.shards import ModelShards


class PluginModel(ModelShards):
    """A model that a Megatron script built.

    Args:
        run: the configuration, with Megatron's layout in it.
        chunks: results of the script's model provider on this rank.
        use_te: the modules are Transformer Engine's.
        micro_batches: of a step, by Megatron's batch sizes.

    Raises:
        ConfigError: the model is not that of `run.model`.
    """

    def __init__(
        self, run: RunConfig, chunks: list[Any], *, use_te: bool, micro_batches: int
    ) -> None:
        self.directory = Path(run.model)
        super().__init__(run, architecture(read_config(self.directory)))
        self.chunks = chunks
        self.micro_batch_multiple = micro_batches
        """Number of micro-batches of a step, which Megatron fixes."""
        modules = unwrap_model(chunks)
        for module in modules:
            arguments.check_model(module, self.architecture, self.directory)
        self.parameters = parameters.by_weight(self.architecture, modules, self.experts, use_te)
        self.route(modules)

    def check_count(self, found: int, step: int) -> None:
        """Refuse a step that does not fit into Megatron's number of micro-batches.

        Raises:
            ConfigError: names the sizes.
        """
        if found > self.micro_batch_multiple:
            raise ConfigError(
                f"step {step}: its sequences need {found} micro-batches of"
                f" schedule.micro_batch_tokens = {self.run.schedule.micro_batch_tokens} tokens, and"
                " --global-batch-size / (--micro-batch-size x data-parallel size) makes"
                f" {self.micro_batch_multiple}: raise --global-batch-size or the tokens"
            )
