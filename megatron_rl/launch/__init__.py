"""The torchrun entry: every rank learns its role from the configuration.

The first `roles.trainer_ranks` ranks are the Megatron world, the others are generators; trainer
rank 0 starts the orchestrator beside itself. Ranks find each other through torchrun's own store.
Outside torchrun, and under a torchrun with one rank, the command starts itself anew with the number
of ranks that the configuration needs.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from megatron_rl.config import ConfigError, RunConfig, load_config
from megatron_rl.launch.quiet import quiet_third_parties

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
    """
    quiet_third_parties()
    config = load_config(path, overrides)
    needed = config.roles.world_size if command == "train" else config.roles.trainer_ranks
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" not in os.environ or started == 1 < needed:
        _start_torchrun(command, path, overrides, needed)
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

        run_trainer_role(config, rank, connect_store(config), train=command == "train")
    else:
        from megatron_rl.launch.generator import run_generator_role

        run_generator_role(config, rank, connect_store(config))


def _start_torchrun(command: Command, path: Path | None, overrides: list[str], ranks: int) -> None:
    """Replace this process by torchrun with `ranks` ranks on this node."""
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in TORCHRUN_VARIABLES and not k.startswith("TORCHELASTIC_")
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    arguments = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    arguments += [f"--nproc-per-node={ranks}", "-m", "megatron_rl.cli", command]
    if path is not None:
        arguments += ["--config", str(path)]
    sys.stdout.flush()
    os.execve(sys.executable, [*arguments, *overrides], environment)


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
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"megatron_rl/{restart}", store)
