"""The run on one page: every rank learns its role, sets up, loops, and shuts down.

    torchrun ranks 0 .. T-1     trainer      `run_trainer_rank` below: Megatron's world and the loop
    child of trainer rank 0     orchestrator `orchestrator/main.py`, then `event_loop.py`
    torchrun ranks T ..         generators   `generator/supervisor.py`, which starts
    `megatron-rl generate`                   `generator/role.py`, then `serve.py` and `engine.py`

`train_loop` is the trainer's half of a step. The orchestrator's half is one handler per message in
`orchestrator/event_loop.py`, the generators' half is `Generator.work` in `generator/serve.py`;
`messages.py` has everything that they send each other. A replay (`orchestrator/replay.py`) has the
trainer's ranks alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_rl import compat, launch, liveness, messages, run_lock
from megatron_rl.compat import megatron_fixes, upstream, vllm_fixes
from megatron_rl.config import ConfigError, RunConfig, load_config, save_config
from megatron_rl.orchestrator.replay import Replay, ReplayPlan, plan_replay
from megatron_rl.orchestrator.run_plan import print_plan

if TYPE_CHECKING:
    from megatron_rl.trainer.client import TrainerClient
    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.publisher import Publisher


def run(
    command: Literal["train", "sft"],
    path: Path | None,
    overrides: list[str],
    replay: Path | None = None,
    steps: str | None = None,
) -> None:
    """Run this rank's role, or start torchrun if the ranks are not running yet.

    The command `sft` is the supervised stage alone. `overrides` are dotted options on top of the
    YAML file `path` (None: the defaults), or of the configuration of the run whose `steps` are
    trained again (`replay`).

    Raises:
        ConfigError: a configuration that cannot run, or another number of ranks than it needs.
        FolderInUse: another run writes to its folder.
        UnsupportedVersionError: an installed package may have a fault that spoils the run.
    """
    plan = None if replay is None else plan_replay(replay, steps, overrides)
    config = load_config(path, overrides) if plan is None else plan.config
    given = {"--config": path, "--replay": replay, "--steps": steps}
    options = [x for key, value in given.items() if value is not None for x in (key, str(value))]
    arguments = [command, *options, *overrides]
    roles = config.roles
    needed = roles.world_size if command == "train" else roles.trainer_ranks
    name = str(path or replay or "the default configuration")
    torchrun = launch.torchrun_for(needed, name, roles.gpus_per_node, one_gpu=roles.one_gpu)
    if torchrun is not None:
        # Raise what every rank would raise, once.
        from megatron_rl.models.start_checkpoint import start_directory

        directory = start_directory(config)
        upstream.check(megatron_fixes.FIXES)
        alone = command == "sft" or plan is not None
        if not alone and launch.generator_python(config) in (None, sys.executable):
            from megatron_rl.generator.cpu_attention import check_head_size

            upstream.check(vllm_fixes.FIXES)
            check_head_size(directory)
        launch.exec_torchrun(torchrun, arguments, config.fleet.trainer_restarts)
    launch.check_world_size(config, needed)
    rank = int(os.environ["RANK"])
    if rank == 0:
        _lock = run_lock.hold(config.output_dir)  # until this process ends
    run_lock.end_after_final_error(config.output_dir)
    try:
        if rank == 0 and command == "train":
            print_plan(config)
            sys.stdout.flush()
        if rank >= config.roles.trainer_ranks:
            launch.run_generator_rank(config, rank, launch.connect_store(config))
        else:
            liveness.begin(config, "trainer", rank)
            store = launch.connect_store(config)
            run_trainer_rank(config, rank, store, reinforce=command == "train", replay=plan)
    except Exception as e:
        launch.record_if_final(config.output_dir, e)
        raise


def run_trainer_rank(
    config: RunConfig, rank: int, store: Any, *, reinforce: bool, replay: ReplayPlan | None = None
) -> None:
    """Run a trainer rank from the process group to the end of the run.

    `rank` and `store` are torchrun's. Without `reinforce` it ends after the supervised stage. A
    `replay` has neither that nor orchestrator.
    """
    compat.collect_rarely()
    import psutil
    import torch

    from megatron_rl.trainer import gpu_setup

    gpu_setup.prepare(config.parallel, config.precision)
    from megatron_rl.compat.quiet import show_own_notices
    from megatron_rl.models import start_checkpoint
    from megatron_rl.trainer import world
    from megatron_rl.trainer.sft import run_stage

    interrupted = watch_signals()
    threads = config.roles.trainer_threads or int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    if rank == config.roles.trainer_ranks - 1 and config.metrics.terminal != "off":
        show_own_notices()  # of the LM head: the last rank is in the last pipeline stage
    world.init_world(config, rank, config.roles.trainer_ranks, store)
    liveness.sign("loading")
    # `make demo` passes the duration of the set-up before this process.
    phases = {"set_up": float(os.environ.get("MEGATRON_RL_SETUP_SECONDS", "0"))}
    phases["imports"] = time.time() - psutil.Process().create_time()
    directory = start_checkpoint.start_directory(config)
    makes_start = config.made_start is not None
    if start_checkpoint.needs_supervised_stage(config) or not (reinforce or makes_start):
        started = time.monotonic()
        # A run with its generators ends in its own loop.
        finished = run_stage(config, rank, (lambda: False) if reinforce else interrupted)
        phases["supervised"] = time.monotonic() - started
        if not reinforce and rank == 0:
            result = directory if makes_start else config.output_dir / "final"
            print(f"supervised stage: {result}" if finished else "supervised stage: interrupted")
    elif not reinforce and rank == 0:
        print(f"{directory} exists already, made with the same settings")
    if replay is not None:
        _replay(replay, rank, directory, interrupted)
    elif reinforce:
        _reinforce(config, rank, store, directory, phases, interrupted)
    world.destroy_world()
    liveness.sign("ended")


def _reinforce(
    config: RunConfig,
    rank: int,
    store: Any,
    directory: Path,
    phases: dict[str, float],
    interrupted: Callable[[], bool],
) -> None:
    """Start the orchestrator on rank 0, load the policy, and train to the end."""
    from torch import distributed as dist

    from megatron_rl.orchestrator.child_process import OrchestratorProcess
    from megatron_rl.trainer import checkpoint as checkpoints
    from megatron_rl.trainer import checkpoint_folder, world
    from megatron_rl.trainer.client import connect
    from megatron_rl.trainer.model import Policy
    from megatron_rl.weights.store import node_name

    liveness.sign("loading")
    checkpoint = checkpoint_folder.resume_from(config, rank)
    with contextlib.ExitStack() as stack:
        orchestrator = None
        if rank == 0:
            save_config(config)
            orchestrator = OrchestratorProcess(config, directory, phases, checkpoint, node_name())
            stack.push(orchestrator.kill_on_error)
            if not config.roles.one_gpu:
                store.set("orchestrator", orchestrator.endpoint)
        policy = Policy(config, directory)
        start_step = checkpoints.load(config, policy, checkpoint) if checkpoint else 0
        if orchestrator is not None and config.roles.one_gpu:
            # An engine takes what another process allocates during its start for its own.
            store.set("orchestrator", orchestrator.endpoint)
        client, publisher = connect(stack, config, policy, store, orchestrator, interrupted)
        train_loop(config, policy, client, publisher, start_step, interrupted)
        liveness.sign("evaluating")
        if orchestrator is not None:
            orchestrator.wait(config.timeouts.evaluation_seconds)
        dist.barrier(group=world.control_group())  # generators read every rank's store until now


def _replay(plan: ReplayPlan, rank: int, directory: Path, interrupted: Callable[[], bool]) -> None:
    """Load the policy as the run had it, and train on the recorded batches."""
    from megatron_rl.trainer import checkpoint as checkpoints
    from megatron_rl.trainer.checkpoint_folder import find_damage, resume_from
    from megatron_rl.trainer.model import Policy

    config = plan.config
    resumed = resume_from(config, rank)
    checkpoint = resumed or plan.checkpoint
    if not resumed and checkpoint and (problem := find_damage(checkpoint)):
        raise ConfigError(f"--replay: {problem}; begin at step 0, or at another checkpoint")
    if rank == 0:
        save_config(config)
    policy = Policy(config, directory)
    step = checkpoints.load(config, policy, checkpoint) if checkpoint else 0
    client = Replay(plan, step, resumed=resumed is not None) if rank == 0 else None
    with contextlib.closing(client) if client else contextlib.nullcontext():
        train_loop(config, policy, client, None, step, interrupted)


def train_loop(
    config: RunConfig,
    policy: Policy,
    client: TrainerClient | Replay | None,
    publisher: Publisher | None,
    start_step: int,
    stop_requested: Callable[[], bool],
) -> None:
    """Train until a batch says stop or any rank is interrupted; collective over trainer ranks.

    Per step v, with weights of version v:

        batch = next_batch(v)           rank 0 asks the orchestrator, each rank gets its part
        checkpoint of step v            if due; it is written while the next steps are trained
        train_step -> step_done         the weights are v + 1 now
        publisher.publish               version v + 1, complete before it is announced

    The policy has the weights of `start_step`. Only rank 0 has the client of the orchestrator, and
    a replay no publisher.
    """
    from megatron_rl.trainer.checkpoint import Saver
    from megatron_rl.trainer.hf_checkpoint import save_huggingface
    from megatron_rl.trainer.start_comparison import StartComparison
    from megatron_rl.trainer.step import Trainer, next_batch

    trainer, step = Trainer(config, policy, StartComparison(policy)), start_step
    saver = Saver(config, policy)
    publish = (lambda _: None) if publisher is None else publisher.publish
    publish(step)
    while True:
        started = time.perf_counter()
        batch, interrupted = next_batch(
            client, step, lambda: stop_requested() or saver.failed(), policy
        )
        wait_seconds = time.perf_counter() - started
        if batch.save or batch.stop or interrupted:
            saver.save(step, None if client is None else client.save_state)
        if batch.stop or interrupted:
            break
        done = trainer.train_step(batch, step)
        if client is not None:
            client.step_done(done, wait_seconds)
        step += 1
        publish(step)
    saver.wait()
    if publisher is not None:
        publisher.wait()
    if not interrupted:
        save_huggingface(policy, config.output_dir / "final", policy.directory)
    if client is not None:
        client.send(messages.TrainerDone(step=step, interrupted=interrupted))


def watch_signals() -> Callable[[], bool]:
    """Let SIGINT and SIGTERM request a clean end (checkpoint, then exit); return `requested()`.

    So does the end of torchrun, which would leave this rank alone.
    """
    received, parent = list[int](), os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    return lambda: bool(received) or os.getppid() != parent
