"""Join a pretraining script to a run: the roles under one torchrun, and wrappers for `pretrain`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl import liveness, run_lock
from megatron_rl.compat.megatron_fixes import before_training_schedules
from megatron_rl.config import ConfigError, RunConfig, save_config
from megatron_rl.files import report_failure
from megatron_rl.launch import connect_store, record_if_final, run_generator_rank
from megatron_rl.megatron_plugin import arguments
from megatron_rl.megatron_plugin.data_iterator import (
    MicroBatchIterator,
    PluginSteps,
    loss_function,
    state_folder,
)
from megatron_rl.megatron_plugin.plugin_model import PluginModel, adopt
from megatron_rl.messages import TrainerDone
from megatron_rl.orchestrator.child_process import OrchestratorProcess
from megatron_rl.trainer import world
from megatron_rl.trainer.client import connect
from megatron_rl.trainer.megatron_build import finalize_gradients
from megatron_rl.weights.store import node_name

CONFIG = "plugin_config"  # store key of the configuration that the trainers pass to the generators


def join(argv: list[str] | None = None) -> PretrainingPlugin:
    """Find this rank's role; the first call of a script. A generator rank does not return.

    Raises:
        ConfigError: the configuration of `--rl-config` cannot run on the ranks that were started.
    """
    own = arguments.peek(sys.argv[1:] if argv is None else argv)
    if own.rl_config is None:
        return PretrainingPlugin(None, None)
    sys.excepthook = functools.partial(_report, None)
    config = arguments.read(own, [])
    arguments.check_config(config)
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    trainers = ranks - config.roles.generator_ranks
    if "MASTER_PORT" not in os.environ or trainers < 1:
        raise ConfigError(
            f"{ranks} ranks were started and roles.generator_ranks is"
            f" {config.roles.generator_ranks}: start the script by torchrun with the trainers'"
            " ranks plus that many"
        )
    store = connect_store(config)
    if rank >= trainers:
        config = RunConfig.model_validate_json(store.get(CONFIG))
        run_lock.end_after_final_error(config.output_dir)
        sys.excepthook = functools.partial(_report, config.output_dir)
        run_generator_rank(config, rank, store)
        sys.exit(0)
    # Megatron reads WORLD_SIZE: show it the trainer ranks only.
    os.environ["WORLD_SIZE"] = str(trainers)
    return PretrainingPlugin(own, store)


def _report(
    folder: Path | None, kind: type[BaseException], error: BaseException, trace: Any
) -> None:
    """Show the error that ends this rank in torchrun's last lines; record it in a run's folder."""
    report_failure(f"{kind.__name__}: {error}")
    if folder is not None:
        record_if_final(folder, error)
    sys.__excepthook__(kind, error, trace)


class PretrainingPlugin:
    """Wrappers around the pieces of a pretraining script; without `--rl-config` they do nothing."""

    def __init__(self, own: Any, store: Any) -> None:
        self._own, self._store = own, store
        self._orchestrator: OrchestratorProcess | None = None
        self._stack = contextlib.ExitStack()
        self._modules: list[Any] = []
        self._chunks: Sequence[Any] = ()
        self._steps: PluginSteps | None = None
        self._ended, self._agent = False, os.getppid()

    @property
    def active(self) -> bool:
        """True if the script trains by reinforcement learning."""
        return self._store is not None

    def arguments(self, provider: arguments.Provider | None = None) -> arguments.Provider:
        """Return `extra_args_provider` with the plug-in's arguments after the script's own."""

        def both(parser: arguments.Parser) -> arguments.Parser:
            extend = arguments.extend if self.active else arguments.add_arguments
            return extend(provider(parser) if provider else parser)

        return both

    def model(self, source: Any) -> Any:
        """Return the model provider or the model configuration (`pre_wrap_hooks`), for RL.

        `pretrain` builds the model from it: a provider function, or a configuration for
        `pretrain_cfg_container_from_args` (Megatron-Core 0.19).

        Raises:
            ConfigError: neither of the two.
        """
        if not self.active:
            return source
        if hasattr(source, "pre_wrap_hooks"):
            source.pre_wrap_hooks.append(self._adopt)
            return source
        if not callable(source):
            raise ConfigError(
                f"rl.model({source!r}): neither a model provider nor a model configuration with"
                " pre_wrap_hooks; pass what the script gives to Megatron's pretrain"
            )

        @functools.wraps(source)
        def build(*args: Any, **kwargs: Any) -> Any:
            return self._adopt([source(*args, **kwargs)])[0]

        return build

    def _adopt(self, modules: list[Any]) -> list[Any]:
        for module in modules:
            adopt(module.config)
        self._modules += modules
        return modules

    def step(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward_step_func` with the run's loss in place of the script's."""
        return self._forward_step if self.active else forward_step

    def data(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """Return `train_valid_test_dataset_provider`; call it after Megatron's argument parsing.

        Raises:
            ConfigError: arguments and configuration that don't go together.
        """
        if not self.active:
            return provider
        from megatron.training import get_args

        args = get_args()
        if file_keys := arguments.megatron_keys_in(self._own):
            raise ConfigError(
                f"{', '.join(file_keys)} in {self._own.rl_config} or --rl-set: Megatron's own"
                " arguments and environment decide these keys; remove them"
            )
        generators = arguments.read(self._own, []).roles.generator_ranks
        config = arguments.read(self._own, arguments.of_megatron(args, generators))
        arguments.check(args, config)
        if args.transformer_impl == "local":
            config.schedule.packing = False
        if args.rank == 0:
            self._stack.enter_context(run_lock.hold(config.output_dir))
        run_lock.end_after_final_error(config.output_dir)
        sys.excepthook = functools.partial(_report, config.output_dir)
        if args.rank == 0:
            self._store.set(CONFIG, config.model_dump_json())
        liveness.begin(config, "trainer", args.rank)
        liveness.sign("loading")

        def iterators(_: Any, vp_stage: int | None = None) -> tuple[MicroBatchIterator, None, None]:
            args.eval_iters = 0  # the generators evaluate, at --eval-interval
            if self._steps is None:
                self._steps = self._start(config, args)
            count, save = _micro_batches(args), args.dataloader_save
            directory = Path(save) if save and args.rank == 0 else None
            return MicroBatchIterator(self._steps, args.iteration, count, directory), None, None

        if args.dataloader_save is None:
            args.dataloader_save = args.save
        iterators.is_distributed = True  # type: ignore[attr-defined]
        before_training_schedules(self._begin)
        # Megatron saves and leaves at this one.
        signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(args.exit_signal))
        return iterators

    def finish(self) -> None:
        """Publish the last weights, and wait for the last evaluation and the report.

        Raises:
            RunError: the orchestrator did not end well.
        """
        if self._steps is None or self._ended:
            return
        self._steps.finish(self._chunks)
        self._leave(self._steps.config.timeouts.evaluation_seconds, together=True)
        liveness.sign("ended")

    def _start(self, config: RunConfig, args: Any) -> PluginSteps:
        """Start orchestrator and transport, after Megatron has loaded its checkpoint."""
        world.join_world(config)
        if not self._modules:
            raise ConfigError(
                "no model came through rl.model(...): wrap the model provider, or the model"
                " configuration that pretrain_cfg_container_from_args gets (Megatron ignores the"
                " provider then); `megatron-rl doctor --script` shows the lines"
            )
        use_te, count = args.transformer_impl == "transformer_engine", _micro_batches(args)
        model = PluginModel(config, self._modules, use_te=use_te, micro_batches=count)
        if args.rank == 0:
            save_config(config)
            self._orchestrator = OrchestratorProcess(
                config, model.directory, {}, _saved_state(args), node_name()
            )
            self._store.set("orchestrator", self._orchestrator.endpoint)
        atexit.register(self._leave_early)
        connected = connect(self._stack, config, model, self._store, self._orchestrator)
        return PluginSteps(config, model, *connected, args.iteration)

    def _leave(self, seconds: float, *, together: bool = False) -> None:
        """Wait for the orchestrator on rank 0; `together`, other ranks wait for rank 0."""
        assert self._steps is not None
        self._ended, step, client = True, self._steps.steps, self._steps.client
        liveness.sign("evaluating", step)
        with self._stack:
            if client is not None and self._orchestrator is not None:
                interrupted = step < self._steps.config.schedule.steps
                client.send(TrainerDone(step=step, interrupted=interrupted))
                self._orchestrator.wait(seconds)
            if together:  # generators read every rank's store until now
                dist.barrier(group=world.control_group())

    def _leave_early(self) -> None:
        """End the run when `pretrain` exits the process (a signal, `--exit-interval`) or fails."""
        if not self._ended and self._steps is not None:
            self._leave(self._steps.config.timeouts.shutdown_seconds)

    def _begin(self, step: int, chunks: Sequence[Any]) -> None:
        assert self._steps is not None
        if os.getppid() != self._agent:  # torchrun is gone, which would leave this rank alone
            signal.raise_signal(signal.SIGINT)
        self._chunks = chunks
        for module in self._modules:  # 0.18 replaces it when training begins
            module.config.finalize_model_grads_func = self._finalize
        self._steps.begin(step, chunks)

    def _forward_step(
        self, data_iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        assert self._steps is not None and not return_schedule_plan
        own = self._steps.model
        return own.forward(model, next(data_iterator)), loss_function(own.micro_batch_multiple)

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        assert self._steps is not None
        finalize_gradients(*args, **kwargs)
        self._steps.trained()


def _micro_batches(args: Any) -> int:
    return int(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))


def _saved_state(args: Any) -> Path | None:
    """Return the orchestrator's state of the iteration that Megatron loaded; None at 0."""
    if args.iteration == 0:
        return None
    folder = state_folder(Path(args.dataloader_save or args.load), args.iteration)
    if not folder.is_dir():
        raise ConfigError(
            f"--load has iteration {args.iteration}, and {folder} holds no state of a run: to begin"
            " reinforcement from a pretrained checkpoint, add --finetune"
        )
    return folder
