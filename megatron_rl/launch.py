"""Processes of a run: torchrun, ranks, and the interpreter of the generators.

One torchrun starts all ranks. Outside torchrun, and under a torchrun with one rank per node, the
command re-executes itself with the ranks that the configuration needs, one per GPU where there
are GPUs (`torchrun_for`). Ranks find each other through torchrun's own store.
"""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_rl import run_lock
from megatron_rl.compat.upstream import UnsupportedVersionError
from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.generator.process_environment import TORCHRUN_VARIABLES
from megatron_rl.generator.supervisor import EngineStartError, supervise
from megatron_rl.orchestrator import RunError
from megatron_rl.weights.store import FOLDER_PREFIX, hold, remove_unused

GENERATOR_PYTHON = "MEGATRON_RL_GENERATOR_PYTHON"  # where `roles.generator_python` is unset
# These belong to the environment that is left; torchrun's variables and all others are kept.
_LEFT_BEHIND = ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def torchrun_for(
    needed: int,
    config: str,
    gpus_per_node: int,
    environment: Mapping[str, str] = os.environ,
    gpus: int | None = None,
    *,
    one_gpu: bool = False,
) -> list[str] | None:
    """Return the options of the torchrun to start, or None if enough ranks are already running.

    A single node without GPUs starts all `needed` ranks, up to `gpus_per_node`. A node with GPUs
    starts one rank per GPU, or all of them on one (`one_gpu`). Messages name the configuration
    `config`; `gpus` are those of this node (None: counted when needed).

    Raises:
        ConfigError: all GPUs of all nodes are too few; names the number of nodes it takes.
    """
    world = int(environment.get("WORLD_SIZE", "1"))
    local = int(environment.get("LOCAL_WORLD_SIZE", world if world == 1 else 0))
    under_torchrun = "RANK" in environment
    if under_torchrun and (local != 1 or world == needed):
        return None
    nodes = world if under_torchrun else 1
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count()
    if not gpus and nodes > 1:
        return None
    if not gpus and needed > gpus_per_node:
        raise ConfigError(
            f"{config} needs {needed} ranks, and this node has no GPU: without GPUs a node starts"
            f" {gpus_per_node} at most (roles.gpus_per_node); use --dry-run to look at the run"
        )
    if not gpus:
        return ["--standalone", f"--nproc-per-node={needed}"]
    if one_gpu and nodes == 1:
        gpus = needed
    per_node = min(gpus, -(-needed // nodes))
    if per_node * nodes != needed:
        wide = -(-needed // gpus)
        raise ConfigError(
            f"{config} needs {needed} ranks, one GPU each, and {nodes} node(s) of {gpus} GPU(s)"
            f" have {gpus * nodes}: start it on {wide} node(s) with torchrun --nnodes {wide}"
            f" --nproc-per-node {needed // wide}, ask `megatron-rl plan` for a layout of another"
            " size (--world), or hide the GPUs to run on CPU (CUDA_VISIBLE_DEVICES=)"
        )
    if nodes == 1:
        return ["--standalone", f"--nproc-per-node={per_node}"]
    # The port of the torchrun that started this process stays taken while it lives.
    port, rank = int(environment["MASTER_PORT"]) + 1, environment["GROUP_RANK"]
    master = [f"--master-addr={environment['MASTER_ADDR']}", f"--master-port={port}"]
    return [f"--nnodes={nodes}", f"--node-rank={rank}", *master, f"--nproc-per-node={per_node}"]


def exec_torchrun(options: Sequence[str], arguments: Sequence[str], restarts: int) -> None:
    """Replace this process by torchrun, with `megatron-rl ARGUMENTS` as each rank's command.

    It holds its folder of logs (`weights.store.hold`), which the next start of a run removes.
    """
    environment = {k: v for k, v in os.environ.items() if not TORCHRUN_VARIABLES.fullmatch(k)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    remove_unused(Path(tempfile.gettempdir()), FOLDER_PREFIX)
    logs = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
    os.set_inheritable(hold(Path(logs)), True)
    options = [f"--max-restarts={restarts}", f"--log-dir={logs}", *options]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    sys.stdout.flush()
    os.execve(sys.executable, [*command, "-m", "megatron_rl.cli", *arguments], environment)


def check_world_size(config: RunConfig, needed: int) -> None:
    """Raise ConfigError unless torchrun started as many ranks as the configuration needs."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != needed:
        trainers, generators = config.roles.trainer_ranks, config.roles.generator_ranks
        others = f" + roles.generator_ranks {generators}" if needed > trainers else ""
        raise ConfigError(
            f"torchrun started {started} ranks and the configuration needs {needed}"
            f" (roles.trainer_ranks {trainers}{others}): use --nnodes x --nproc-per-node ="
            f" {needed}, or change roles"
        )


def connect_store(config: RunConfig) -> Any:
    """Connect to torchrun's key-value store, under a prefix of this start of the run."""
    from torch.distributed import PrefixStore, TCPStore

    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=not agent_hosts and os.environ["RANK"] == "0",
        timeout=timedelta(seconds=config.timeouts.startup_seconds),
    )
    return PrefixStore(f"megatron_rl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def generator_python(config: RunConfig) -> str | None:
    """Return `roles.generator_python`, else that of the environment, else None: this interpreter.

    Raises:
        ConfigError: not an executable file.
    """
    chosen, source = config.roles.generator_python, "roles.generator_python"
    if chosen is None and os.environ.get(GENERATOR_PYTHON):
        chosen, source = Path(os.environ[GENERATOR_PYTHON]), GENERATOR_PYTHON
    if chosen is None:
        return None
    path = chosen.expanduser().absolute()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ConfigError(
            f"{source} is {chosen}: no executable file is there; give the path of the python of an"
            " environment with vLLM and megatron_rl (ENV/bin/python)"
        )
    return str(path)


def run_generator_rank(config: RunConfig, rank: int, store: Any) -> None:
    """Keep the engine of a generator rank running, in the generators' interpreter (`supervise`).

    Raises:
        ConfigError: the interpreter is not an executable file.
    """
    # Compare paths, not link targets: a virtual environment's python is a link to another's.
    python, environment = generator_python(config) or sys.executable, dict(os.environ)
    if python != sys.executable:
        environment = {k: v for k, v in environment.items() if k not in _LEFT_BEHIND}
        # vLLM's packages start tools of their environment by name (ninja), not another one's.
        tools = [str(Path(python).parent), environment.get("PATH", os.defpath)]
        environment["PATH"] = os.pathsep.join(tools)
    supervise(config, rank, store, python, environment)


def record_if_final(folder: Path, error: BaseException) -> None:
    """Record an error that a restart of the ranks would only repeat, in the run's folder.

    The ranks that torchrun starts again end by `run_lock.final_error`.
    """
    kinds = ConfigError | UnsupportedVersionError | FloatingPointError | RunError | EngineStartError
    checkpoints = sys.modules.get("megatron_rl.trainer.checkpoint")  # it imports Megatron
    if isinstance(error, kinds) or (checkpoints and isinstance(error, checkpoints.SaveError)):
        run_lock.record_final_error(folder, f"{type(error).__name__}: {error}")
