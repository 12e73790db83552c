"""The two roles under one torchrun, and the wrappers around what a script gives to `pretrain`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.config.saved import save_config
from megatron_rl.launch import connect_store, generator_python, weights_rendezvous
from megatron_rl.megatron_plugin import arguments
from megatron_rl.megatron_plugin.data_iterator import (
    RolloutIterator,
    Rollouts,
    loss_of,
    state_folder,
)
from megatron_rl.megatron_plugin.plugin_model import PluggedModel
from megatron_rl.messages import TrainerDone
from megatron_rl.orchestrator.child_process import OrchestratorProcess
from megatron_rl.patching import require
from megatron_rl.trainer import world
from megatron_rl.trainer.client import TrainerClient
from megatron_rl.trainer.forward import forward
from megatron_rl.weights.transports import open_publisher

CONFIG = "plugin_config"
"""Key of the store under which the trainers tell the generators their configuration."""


def join(argv: list[str] | None = None) -> PretrainingPlugin:
    """Learns this rank's role; the first call of a script. Generators serve here until the end.

    Args:
        argv: the script's arguments; those of the process by default.

    Raises:
        ConfigError: `--rl-config` names a configuration that cannot run on the ranks that are here.
        PatchNeededError: Megatron-Core here has a fault that would spoil the run.
    """
    require("pretrain", "trainer")
    own = arguments.peek(sys.argv[1:] if argv is None else argv)
    if own.rl_config is None:
        return PretrainingPlugin(None, None)
    config = arguments.read(own, [])
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    trainers = ranks - config.roles.generator_ranks
    if "MASTER_PORT" not in os.environ or trainers < 1:
        raise ConfigError(
            f"{ranks} ranks are started and roles.generator_ranks is"
            f" {config.roles.generator_ranks}: start the script by torchrun with the ranks of the"
            " trainers and as many more"
        )
    store, rendezvous = connect_store(config), weights_rendezvous()
    if rank >= trainers:
        _serve(store)
    # From here on this world is Megatron's.
    os.environ["WORLD_SIZE"] = str(trainers)
    return PretrainingPlugin(own, _Wires(store, rendezvous))


def _serve(store: Any) -> None:
    """Becomes a generator, with the configuration that the trainers have found."""
    config = RunConfig.model_validate_json(store.get(CONFIG))
    with tempfile.NamedTemporaryFile("w", prefix="megatron_rl_", suffix=".json", delete=False) as f:
        f.write(config.model_dump_json())
    python = generator_python(config) or sys.executable
    sys.stdout.flush()
    sys.stderr.flush()
    # A process of its own: nothing that the script has imported is in the engine's way.
    os.execve(
        python,
        [python, "-m", "megatron_rl.megatron_plugin.generator_rank", f.name],
        dict(os.environ),
    )


class _Wires:
    """What connects this rank to the others."""

    def __init__(self, store: Any, rendezvous: Any) -> None:
        self.store, self.rendezvous = store, rendezvous
        self.orchestrator: OrchestratorProcess | None = None
        self.client: TrainerClient | None = None
        self.stack = contextlib.ExitStack()


class PretrainingPlugin:
    """Wrappers around the pieces of a pretraining script; without a configuration they do nothing.

    Args:
        own: the plug-in's arguments; None without `--rl-config`.
        wires: to the other ranks.
    """

    def __init__(self, own: Any, wires: _Wires | None) -> None:
        self._own, self._wires = own, wires
        self._modules: list[Any] = []
        self._wrapped: list[Any] = []
        self._rollouts: Rollouts | None = None
        self._config: RunConfig | None = None
        self._ended = False

    @property
    def active(self) -> bool:
        """Whether the script trains by reinforcement."""
        return self._wires is not None

    def arguments(self, provider: arguments.Provider | None = None) -> arguments.Provider:
        """For `extra_args_provider`: the script's own arguments and the plug-in's."""

        def both(parser: arguments.Parser) -> arguments.Parser:
            parser = arguments.add_arguments(provider(parser) if provider else parser)
            if self.active:
                parser.set_defaults(dataloader_type="external", calculate_per_token_loss=True)
            return parser

        return both

    def model(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """For `model_provider`: the script's own model, whose gradients are divided by nothing."""
        if not self.active:
            return provider

        @functools.wraps(provider)
        def build(*args: Any, **kwargs: Any) -> Any:
            module = provider(*args, **kwargs)
            module.config.finalize_model_grads_func = self._finalize
            self._modules.append(module)
            return module

        return build

    def step(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """For `forward_step_func`: the loss of the run's algorithm in place of the script's."""
        return self._forward_step if self.active else forward_step

    def data(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """For `train_valid_test_dataset_provider`; call it after Megatron has read its arguments.

        Raises:
            ConfigError: arguments and configuration that don't go together.
        """
        if not self.active:
            return provider
        assert self._wires is not None
        from megatron.training import get_args

        args = get_args()
        file_keys = arguments.megatron_keys_in(self._own)
        if file_keys:
            raise ConfigError(
                f"{', '.join(file_keys)} in {self._own.rl_config} or --rl-set: Megatron's own"
                " arguments decide that; take it out"
            )
        generators = arguments.read(self._own, []).roles.generator_ranks
        config = arguments.read(self._own, arguments.of_megatron(args, generators))
        arguments.check(args, config)
        if args.transformer_impl == "local":
            config.schedule.packing = False
        self._config = config
        if args.rank == 0:
            self._wires.store.set(CONFIG, config.model_dump_json())

        def iterators(_: Any, vp_stage: int | None = None) -> tuple[RolloutIterator, None, None]:
            if self._rollouts is None:
                self._rollouts = self._start(config, args)
            count = _micro_batches(args)
            save = args.dataloader_save
            directory = Path(save) if save and args.rank == 0 else None
            return RolloutIterator(self._rollouts, args.iteration, count, directory), None, None

        if args.dataloader_save is None:
            args.dataloader_save = args.save
        iterators.is_distributed = True  # type: ignore[attr-defined]
        return iterators

    def finish(self) -> None:
        """After `pretrain`: the last weights go out, the last evaluation and the report are made.

        Raises:
            OrchestratorFailed: the orchestrator did not end well.
        """
        if self._rollouts is None or self._ended:
            return
        assert self._config is not None
        self._rollouts.publish(self._rollouts.steps)
        self._leave(self._config.timeouts.evaluation_seconds)

    def _start(self, config: RunConfig, args: Any) -> Rollouts:
        """Orchestrator, transport and model, once Megatron has loaded its checkpoint."""
        wires = self._wires
        assert wires is not None
        world.join_world(config)
        model = PluggedModel(
            config,
            self._modules,
            use_te=args.transformer_impl == "transformer_engine",
            micro_batches=_micro_batches(args),
        )
        if args.rank == 0:
            save_config(config)
            state = _saved_state(args)
            orchestrator = OrchestratorProcess(config, model.directory, {}, state)
            wires.orchestrator = orchestrator
            wires.store.set("model_dir", str(model.directory))
            wires.store.set("orchestrator", orchestrator.endpoint)
            wires.client = TrainerClient(
                orchestrator.endpoint,
                config.timeouts,
                active_parameters=model.architecture.active_parameters(),
                alive=orchestrator.ended,
            )
        atexit.register(self._leave_early)
        publisher = open_publisher(config, args.rank, wires.rendezvous)
        if publisher is not None:
            wires.stack.callback(publisher.close)
        return Rollouts(config, model, wires.client, publisher, args.iteration, self._whole)

    def _leave(self, seconds: float) -> None:
        self._ended, wires, config = True, self._wires, self._config
        assert wires is not None and config is not None and self._rollouts is not None
        steps = self._rollouts.steps
        with wires.stack:
            if wires.client is None or wires.orchestrator is None:
                return
            interrupted = steps < config.schedule.steps
            wires.client.done(TrainerDone(step=steps, interrupted=interrupted))
            wires.client.close()
            # Generators may still read the last version.
            wires.orchestrator.wait(seconds)

    def _leave_early(self) -> None:
        """`pretrain` has left the process (a signal, `--exit-interval`), or failed."""
        if not self._ended and self._config is not None and self._rollouts is not None:
            self._leave(self._config.timeouts.shutdown_seconds)

    def _whole(self) -> None:
        """Completes the parameters where an all-gather is still to come."""
        for chunk in self._wrapped:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def _forward_step(
        self, data_iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        if return_schedule_plan:
            raise ConfigError("--overlap-moe-expert-parallel-comm has no output hook; leave it out")
        if all(chunk is not model for chunk in self._wrapped):
            self._wrapped.append(model)
        batch = next(data_iterator)
        output, rows = forward(
            model,
            batch.micro,
            batch.head,
            batch.loss,
            batch.temperature,
            routing=batch.routing,
            stock_attention=True,
        )
        return output, loss_of(batch, rows)

    def _finalize(
        self, model: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any
    ) -> None:
        """Reduces the gradients and divides by nothing: the loss weights hold all divisors."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads(model, None, **kwargs)
        if self._rollouts is not None:
            self._rollouts.trained()


def _micro_batches(args: Any) -> int:
    return int(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))


def _saved_state(args: Any) -> Path | None:
    """The orchestrator's state of the iteration that Megatron has loaded; None at iteration 0.

    Raises:
        ConfigError: there is none.
    """
    if args.iteration == 0:
        return None
    folder = state_folder(Path(args.dataloader_save or args.load), args.iteration)
    if not folder.is_dir():
        raise ConfigError(
            f"--load has iteration {args.iteration}, and {folder} holds no state of a run: to begin"
            " reinforcement from a pretrained checkpoint, add --finetune"
        )
    return folder
