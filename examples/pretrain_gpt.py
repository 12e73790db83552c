"""Pretraining, supervised fine-tuning and reinforcement learning of a GPT with Megatron-LM.

    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --examples train.jsonl ...
    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --rl-config rl.yaml ...

`--examples` is a JSONL file of {"prompt": ..., "completion": ...}. The loss is over completions, so
plain text is a completion without a prompt. `--rl-config` starts RL; docs/pretraining.md shows the
lines that a plain script lacks.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import import_module
from megatron.training import argument_utils, get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from megatron_rl import megatron_plugin

# Megatron-Core 0.18 has no model configurations.
gpt_config_from_args = getattr(argument_utils, "gpt_config_from_args", None)


def extra_args(parser: Any) -> Any:
    """Add the script's own arguments."""
    group = parser.add_argument_group("examples")
    group.add_argument("--examples", type=Path, help="JSONL of prompts and completions.")
    ways = ["config", "provider"] if gpt_config_from_args else ["provider"]
    text = "What Megatron builds the model from: a configuration with hooks (0.19), or a function."
    group.add_argument("--model-from", choices=ways, default=ways[0], help=text)
    return parser


def gpt_builder(
    args: Any,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build a chunk of the model from Megatron's arguments."""
    config = config or core_transformer_config_from_args(args)
    use_te = args.transformer_impl == "transformer_engine"
    if args.spec is not None:
        spec: Any = import_module(args.spec)
        if inspect.isfunction(spec):
            spec = spec(config, vp_stage=vp_stage)
    elif args.num_experts:
        spec = get_gpt_decoder_block_spec(
            config, use_te, normalization=args.normalization, vp_stage=vp_stage
        )
    elif use_te:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm, normalization=args.normalization
        )
    return GPTModel(
        config,
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def model_provider(
    model_builder: Callable[..., GPTModel],
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build a chunk of the model with a builder."""
    options = {"config": config, "pg_collection": pg_collection}
    return model_builder(get_args(), pre_process, post_process, vp_stage, **options)


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of `seq_length` tokens: one example, then padding without a loss."""

    def __init__(self, path: Path, size: int) -> None:
        self.rows = [json.loads(line) for line in path.read_text().splitlines()]
        self.size = size or len(self.rows)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row, tokenizer = self.rows[index % len(self.rows)], get_tokenizer()
        length = get_args().seq_length
        prompt = tokenizer.tokenize(row["prompt"])
        ids = torch.tensor((prompt + tokenizer.tokenize(row["completion"]))[: length + 1])
        tokens = torch.zeros(length + 1, dtype=torch.int64)
        tokens[: len(ids)] = ids
        learned = torch.zeros(length)
        learned[max(len(prompt) - 1, 0) : len(ids) - 1] = 1.0
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": learned}


def train_valid_test_datasets_provider(
    sizes: list[int], vp_stage: int | None = None
) -> list[Examples]:
    """Return the datasets for training, validation and test."""
    return [Examples(get_args().examples, size) for size in sizes]


train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Return the losses of a micro-batch, and the function that sums them up."""
    batch = {k: v.to(next(model.parameters()).device) for k, v in next(data_iterator).items()}
    tokens = batch["tokens"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    losses = model(tokens, positions, None, labels=batch["labels"])

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, count = (losses.float() * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
        return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}

    return losses, loss


if __name__ == "__main__":
    rl = megatron_plugin.join()
    args = parse_and_validate_args(extra_args_provider=rl.arguments(extra_args))
    source = {}
    if args.model_from == "config":
        model_cfg = gpt_config_from_args(args)
        full_config = pretrain_cfg_container_from_args(args, rl.model(model_cfg))
    else:
        full_config = pretrain_cfg_container_from_args(args)
        source = {"model_provider": rl.model(partial(model_provider, gpt_builder))}
    pretrain(
        full_config,
        train_valid_test_dataset_provider=rl.data(train_valid_test_datasets_provider),
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=rl.step(forward_step),
        **source,
    )
    rl.finish()
