"""Megatron's arguments and the run's configuration: each setting is in one of them only."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config import ConfigError, RunConfig, load_config
from megatron_rl.megatron_plugin import flags
from megatron_rl.trainer.reference import recomputes_old

Parser = argparse.ArgumentParser
Provider = Callable[[Parser], Parser]


def add_arguments(parser: Parser) -> Parser:
    """Add `--rl-config`, `--rl-set` and `--dataloader-save`, which Megatron reads but lacks."""
    add = parser.add_argument_group("megatron_rl").add_argument
    text = "YAML file of the run; without it nothing here has an effect."
    add("--rl-config", type=Path, metavar="FILE", help=text)
    text = "Keys of the run's configuration, over those of the file."
    add("--rl-set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=text)
    if "--dataloader-save" not in parser._option_string_actions:
        text = "Where the data iterator's state is saved; default: where --save saves."
        add("--dataloader-save", metavar="DIRECTORY", help=text)
    return parser


def extend(parser: Parser) -> Parser:
    """Add the plug-in's arguments before Megatron reads its own; refuse what RL cannot have.

    Raises:
        ConfigError: names the arguments of this process that do not fit (`flags.refuse`).
    """
    add_arguments(parser)
    flags.set_defaults(parser)
    flags.refuse(parser, sys.argv[1:])
    return parser


def peek(arguments: list[str]) -> argparse.Namespace:
    """Return the plug-in's own arguments, before Megatron reads all of them."""
    return add_arguments(Parser(add_help=False, allow_abbrev=False)).parse_known_args(arguments)[0]


def read(own: argparse.Namespace, extra: list[str]) -> RunConfig:
    """Return the configuration of the file, with `--rl-set` and then dotted options on top.

    Raises:
        ConfigError: as `load_config` does, or a `--rl-set` without "=".
    """
    for item in own.rl_set:
        if "=" not in item:
            raise ConfigError(f"--rl-set {item}: expected KEY=VALUE, as schedule.max_lag_steps=4")
    return load_config(own.rl_config, [*(f"--{item}" for item in own.rl_set), *extra])


_MEGATRONS = (
    *("parallel", "optimizer", "seed", "checkpoint", "roles.trainer_ranks", "schedule.steps"),
    *("precision.params", "evaluation.every_steps", "roles.trainer_threads"),
)
"""Keys and sections that Megatron's own arguments decide, or its environment."""


def megatron_keys_in(own: argparse.Namespace) -> list[str]:
    """Return the keys of the file or `--rl-set` that Megatron's arguments decide."""
    file = yaml.safe_load(own.rl_config.read_text()) or {}
    keys = [item.partition("=")[0] for item in own.rl_set]
    for name, value in file.items():
        keys += [f"{name}.{k}" for k in value] if isinstance(value, dict) else [name]
    return [k for k in keys if k in _MEGATRONS or k.partition(".")[0] in _MEGATRONS]


def of_megatron(args: Any, generator_ranks: int) -> list[str]:
    """Return the keys that Megatron's arguments decide, as dotted options.

    Without `--eval-interval`, evaluations are at the start and the end; Megatron needs a number.

    Raises:
        ConfigError: they do not say how long the run is.
    """
    if not args.train_iters and not args.train_samples:
        raise ConfigError("neither --train-iters nor --train-samples is set: set the run's steps")
    steps = args.train_iters or args.train_samples // args.global_batch_size
    args.eval_interval = min(args.eval_interval or steps, steps)
    keys = {
        "roles.trainer_ranks": args.world_size,
        "roles.generator_ranks": generator_ranks,
        "seed": args.seed,
        "schedule.steps": steps,
        "parallel.tensor": args.tensor_model_parallel_size,
        "parallel.pipeline": args.pipeline_model_parallel_size,
        "parallel.virtual_pipeline": args.virtual_pipeline_model_parallel_size or 1,
        "parallel.context": args.context_parallel_size,
        "parallel.expert": args.expert_model_parallel_size,
        "parallel.expert_tensor": args.expert_tensor_parallel_size or 1,
        "parallel.sequence_parallel": str(bool(args.sequence_parallel)).lower(),
        "parallel.distributed_optimizer": str(bool(args.use_distributed_optimizer)).lower(),
        "precision.params": "bf16" if args.bf16 else "fp32",
        "optimizer.learning_rate": args.lr,
        "optimizer.clip_grad_norm": args.clip_grad,
        "evaluation.every_steps": args.eval_interval,
    }
    return [part for key, value in keys.items() for part in (f"--{key}", str(value))]


def check_config(config: RunConfig) -> None:
    """Refuse a configuration that needs the own training loop, before anything has started.

    Raises:
        ConfigError: names the key and the remedy.
    """
    a, s = config.algorithm, config.schedule
    if a.kl_coefficient:
        raise ConfigError(
            f"algorithm.kl_coefficient is {a.kl_coefficient}: the plug-in keeps no reference"
            " policy; set it to 0, or train with `megatron-rl train`"
        )
    if recomputes_old(config):
        raise ConfigError(
            f"algorithm.old_policy is 'trainer' with schedule.updates_per_phase ="
            f" {s.updates_per_phase}: the plug-in keeps no earlier weights; use 'generator', or"
            " train with `megatron-rl train`"
        )


def check(args: Any, config: RunConfig) -> None:
    """Refuse arguments and configuration that don't go together.

    Raises:
        ConfigError: names the key, the argument and the remedy.
    """
    s = config.schedule
    if s.packing and args.transformer_impl == "local" and "packing" in s.model_fields_set:
        raise ConfigError(
            "schedule.packing is true with --transformer-impl local: Megatron's own attention takes"
            " no packed rows; set it to false, or use Transformer Engine"
        )
