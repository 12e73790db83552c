"""The torchrun entry: every rank learns its role from the configuration.

The first `roles.trainer_ranks` ranks are the Megatron world, the others are generators; trainer
rank 0 starts the orchestrator beside itself. Ranks find each other through torchrun's own store.
Outside torchrun, and under a torchrun with one rank per node, the command starts itself anew with
the ranks that the configuration needs, one per GPU where there are GPUs (`ranks`).
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_rl.config import ConfigError, RunConfig, load_config
from megatron_rl.launch.interpreter import enter_generator_python, generator_python
from megatron_rl.launch.ranks import Start, start_anew
from megatron_rl.launch.start import start_directory
from megatron_rl.patching import require

if TYPE_CHECKING:
    from megatron_rl.weights.rendezvous import Rendezvous

Command = Literal["train", "sft"]

TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def launch(command: Command, path: Path | None, overrides: list[str]) -> None:
    """Run this rank's role, or start torchrun when the ranks are not there yet.

    Raises:
        ConfigError: a configuration that cannot run, or torchrun was given another number of ranks.
        PatchNeededError: an upstream package here has a fault that would spoil the run.
    """
    config = load_config(path, overrides)
    needed = config.roles.world_size if command == "train" else config.roles.trainer_ranks
    started = int(os.environ.get("WORLD_SIZE", "1"))
    name = "the default configuration" if path is None else str(path)
    anew = start_anew(needed, name, config.roles.gpus_per_node)
    if anew is not None:
        start_directory(config)  # a missing checkpoint is said once, not by every rank
        # Once, before ranks are started that would each say the same.
        require("trainer")
        if command == "train" and generator_python(config) in (None, sys.executable):
            require("generator")
        _start_torchrun(command, path, overrides, anew)
    if started != needed:
        raise ConfigError(
            f"torchrun started {started} ranks and the configuration needs {needed}"
            f" (roles.trainer_ranks {config.roles.trainer_ranks}"
            + (
                f" + roles.generator_ranks {config.roles.generator_ranks}"
                if command == "train"
                else ""
            )
            + f"): use --nnodes x --nproc-per-node = {needed}, or change roles"
        )
    rank = int(os.environ["RANK"])
    if rank == 0 and command == "train":
        from megatron_rl.plan import print_plan

        print_plan(config)
        sys.stdout.flush()
    if rank < config.roles.trainer_ranks:
        from megatron_rl.launch.trainer import run_trainer_role

        store, weights = connect_store(config), weights_rendezvous()
        run_trainer_role(config, rank, store, weights, train=command == "train")
    else:
        enter_generator_python(config, _arguments(command, path, overrides))
        from megatron_rl.launch.generator import run_generator_role

        run_generator_role(config, rank, connect_store(config), weights_rendezvous())


def _start_torchrun(command: Command, path: Path | None, overrides: list[str], anew: Start) -> None:
    """Replace this process by torchrun."""
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in TORCHRUN_VARIABLES and not k.startswith("TORCHELASTIC_")
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    arguments = [sys.executable, "-m", "torch.distributed.run", *anew.options()]
    arguments += ["-m", "megatron_rl.cli"]
    sys.stdout.flush()
    os.execve(sys.executable, [*arguments, *_arguments(command, path, overrides)], environment)


def _arguments(command: Command, path: Path | None, overrides: list[str]) -> list[str]:
    """The command line of `megatron-rl` that says the same."""
    return [command, *(("--config", str(path)) if path is not None else ()), *overrides]


def connect_store(config: RunConfig) -> Any:
    """torchrun's own key-value store, under a prefix of this start of the run."""
    from torch.distributed import PrefixStore, TCPStore

    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=not agent_hosts and os.environ["RANK"] == "0",
        timeout=timedelta(seconds=config.timeouts.startup_seconds),
    )
    return PrefixStore(_store_prefix(), store)


def weights_rendezvous() -> Rendezvous:
    """Where weights are asked for: the same store, for processes that torchrun did not start."""
    from megatron_rl.weights.rendezvous import Rendezvous

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return Rendezvous(address, port, f"{_store_prefix()}/weights")


def _store_prefix() -> str:
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"megatron_rl/{restart}"
