"""The trainer role of a rank: supervised stage if it is needed, orchestrator, policy, the loop."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from tokenizers import Tokenizer

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.config.saved import save_config
from megatron_rl.data.tiny_tokenizer import save_tiny_tokenizer
from megatron_rl.launch import start
from megatron_rl.launch.notices import show_own_notices
from megatron_rl.launch.orchestrator import OrchestratorProcess
from megatron_rl.launch.publisher import open_publish
from megatron_rl.models import tiny
from megatron_rl.orchestrator.client import TrainerClient
from megatron_rl.policy import checkpoint as checkpoints
from megatron_rl.policy.loop import run_trainer
from megatron_rl.policy.model import Policy
from megatron_rl.policy.supervised import run_supervised, save_huggingface
from megatron_rl.policy.world import destroy_world, init_world
from megatron_rl.weights.rendezvous import Rendezvous
from megatron_rl.weights.transports import refuse_contradictions


def run_trainer_role(
    config: RunConfig, rank: int, store: Any, rendezvous: Rendezvous, *, train: bool
) -> None:
    """Everything a trainer rank does, from the process group to the end of the run.

    Args:
        config: the run's configuration.
        rank: rank under torchrun, which is the rank in the Megatron world.
        store: torchrun's store.
        rendezvous: where generators ask for weights.
        train: False ends after the supervised stage (`megatron-rl sft`).
    """
    interrupted = _Interrupt()
    if train:
        refuse_contradictions(config, cuda=torch.cuda.is_available())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if rank == config.roles.trainer_ranks - 1 and config.observe.terminal != "off":
        show_own_notices()  # the LM head's: the last rank is in the last pipeline stage
    init_world(config, rank, config.roles.trainer_ranks, store)
    # `make demo` says how long the set-up before this process took.
    phases = {"set_up": float(os.environ.get("MEGATRON_RL_SETUP_SECONDS", "0"))}
    phases["imports"] = time.time() - psutil.Process().create_time()
    if start.needs_supervised_stage(config):
        at = time.monotonic()
        _supervised_stage(config, rank)
        phases["supervised"] = time.monotonic() - at
    elif not train and rank == 0:
        print(f"{start.start_directory(config)} is there already, made with the same settings")
    if train:
        _reinforcement(config, rank, store, rendezvous, phases, interrupted)
    destroy_world()


class _Interrupt:
    """SIGINT and SIGTERM ask for a clean end: a checkpoint, then exit."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def __call__(self) -> bool:
        return self.asked


def _supervised_stage(config: RunConfig, rank: int) -> None:
    """Train the tiny model on demonstrations and write the start checkpoint."""
    directory = start.start_directory(config)
    initial = directory.with_name(directory.name + "_initial")
    if rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
        tiny.create(config.model, initial, save_tiny_tokenizer, seed=config.seed)
    torch.distributed.barrier()
    tokenizer = Tokenizer.from_file(str(initial / "tokenizer.json"))
    policy = Policy(config, initial)
    said = time.monotonic()

    def on_step(step: int, loss: float) -> None:
        nonlocal said
        if rank == 0 and config.observe.terminal != "off" and time.monotonic() - said > 5:
            said = time.monotonic()
            print(
                f"supervised stage: step {step + 1}/{config.sft.steps}, loss {loss:.3f}", flush=True
            )

    run_supervised(config, policy, start.examples_by_step(config, tokenizer), on_step)
    save_huggingface(policy, directory, source=initial)
    if rank == 0:
        start.mark_made(config, directory)
        shutil.rmtree(initial)
    torch.distributed.barrier()


def _reinforcement(
    config: RunConfig,
    rank: int,
    store: Any,
    rendezvous: Rendezvous,
    phases: dict[str, float],
    interrupted: _Interrupt,
) -> None:
    directory = start.start_directory(config)
    checkpoint = _checkpoint(config, rank)
    orchestrator = None
    if rank == 0:
        save_config(config)
        orchestrator = OrchestratorProcess(config, directory, phases, checkpoint)
        store.set("model_dir", str(directory))
        store.set("orchestrator", orchestrator.endpoint)
    try:
        policy = Policy(config, directory)
        start_step = checkpoints.load(config, policy, checkpoint) if checkpoint else 0
        with contextlib.ExitStack() as stack:
            client = None
            if orchestrator is not None:
                client = TrainerClient(
                    orchestrator.endpoint,
                    config.timeouts,
                    active_parameters=start.active_parameters(directory),
                    alive=orchestrator.ended,
                    stop_requested=interrupted,
                )
                stack.callback(client.close)
            publish = stack.enter_context(open_publish(config, rank, rendezvous, client))
            run_trainer(
                config,
                policy,
                client,
                publish=publish,
                start_step=start_step,
                stop_requested=interrupted,
            )
            if orchestrator is not None:
                orchestrator.wait(config.timeouts.evaluation_seconds)
    except BaseException:
        if orchestrator is not None:
            orchestrator.kill()
        raise


def _checkpoint(config: RunConfig, rank: int) -> Path | None:
    """The checkpoint to go on from; without `resume`, an older run's are moved aside.

    Ranks that torchrun started again (`--max-restarts`) go on from the newest one by themselves.

    Raises:
        ConfigError: `resume` is set and there is none.
    """
    root = checkpoints.folder(config)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if config.resume or restarted:
        found = checkpoints.find_latest(root)
        if found is None and not restarted:
            raise ConfigError(
                f"resume is true: {root} holds no complete checkpoint; start without --resume"
            )
        if found is not None:
            return found
    if rank == 0 and root.exists():
        n = 1
        while (aside := root.with_name(f"{root.name}.old-{n}")).exists():
            n += 1
        root.rename(aside)
    torch.distributed.barrier()
    return None
