"""Proof, before the first update, that trainer and generators have the same model."""

import dataclasses
import re
from typing import Any

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.trainer.megatron_build import transformer_config
from megatron_rl.trainer.shards import ModelShards

_LAYOUT = {field.name for field in dataclasses.fields(ModelParallelConfig)}
_NEUTRAL = re.compile(r"recompute_|init_method|moe_(z|aux)_loss|.*_impl$|.*fusion|.*grouped_gemm")
"""Options of initialization, of routers' own losses, and of how the same is computed."""
_KNOWN = ("megatron", "megatron_rl", "transformer_engine", "torch", "apex")


def bound(config: RunConfig) -> float:
    """Return the largest mean difference in nats that number formats explain."""
    if config.metrics.max_logprob_error is not None:
        return config.metrics.max_logprob_error
    p = config.precision
    exact = p.params == "fp32" and p.logits != "bf16" and p.generator_head == "fp32"
    return 1e-3 if exact and not torch.cuda.is_available() else 0.1


class StartComparison:
    """Comparison of the log-probs of tokens that the trained weights themselves sampled.

    It ends with the first step that has such tokens: the first one, unless a resumed run begins
    with completions of older versions.
    """

    def __init__(self, shards: ModelShards) -> None:
        self._shards, self._done = shards, False

    def check(self, metrics: dict[str, float], step: int) -> None:
        """Stop a run whose generators have another model; before the update of a step.

        `metrics` are those of `step_metrics.report`, the same on every rank. ConfigError: the mean
        difference is above `bound`; names it, and what the layers have that config.json does not
        say.
        """
        tokens = int(metrics["same_version_logprob_tokens"])
        if self._done or not tokens:
            return
        self._done, run = True, self._shards.run
        mean, limit = metrics["same_version_logprob_error_mean"], bound(run)
        if mean <= limit:
            return
        differing = "; ".join(differences(self._shards)) or "nothing that is seen here"
        raise ConfigError(
            f"step {step}: from the same weights trainer and generators computed log-probs that"
            f" differ by {mean:.3g} nats (mean; max {metrics['same_version_logprob_error_max']:.3g}"
            f") over {tokens} tokens: the bound is {limit:g} (metrics.max_logprob_error). The"
            " generators run the model of config.json, the trainer another one, and nothing was"
            f" updated. In the trainer's layers, config.json does not give: {differing}. Train the"
            " model that the generators run, or raise the bound if number formats explain this"
        )


def differences(shards: ModelShards) -> list[str]:
    """Return the options and classes of this rank's layers that config.json does not give."""
    out = []
    module: Any
    reference = transformer_config(shards.run, shards.architecture, use_te=False)
    for module in shards.modules[:1]:
        for field in dataclasses.fields(TransformerConfig):
            own, given = getattr(module.config, field.name), getattr(reference, field.name)
            plain = own is None or isinstance(own, bool | int | float | str)
            chosen = own not in (given, field.default) and field.name not in _LAYOUT
            if plain and chosen and not _NEUTRAL.match(field.name):
                out.append(f"{field.name} = {own!r} ({given!r} there)")
    for module in shards.modules:
        for name, part in module.named_modules():
            kind = type(part)
            if kind.__module__.partition(".")[0] not in _KNOWN:
                where = re.sub(r"\.\d+\.", ".*.", name)
                out.append(f"{where} is a {kind.__module__}.{kind.__qualname__}")
    return list(dict.fromkeys(out))
