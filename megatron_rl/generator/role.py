"""The generator role of a rank: one vLLM engine, or a device lent to one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from megatron_rl.config import RunConfig
from megatron_rl.weights.rendezvous import Rendezvous


def run_generator_rank(config: RunConfig, rank: int, store: Any, rendezvous: Rendezvous) -> None:
    """Generator rank: the first rank of an engine runs it, the others lend it their device.

    Raises:
        DistStoreError: the trainer did not come up within `timeouts.startup_seconds`.
    """
    from megatron_rl.generator.serve import run_generator

    width = config.roles.generator_tensor_parallel
    engine, member = divmod(rank - config.roles.trainer_ranks, width)
    finished = f"engine-{engine}-finished"
    if member:
        while not store.check([finished]):
            _wait(store, finished, seconds=60.0)
        return
    endpoint = store.get("orchestrator").decode()
    model_dir = store.get("model_dir").decode()
    try:
        run_generator(config, engine, rank, endpoint, model_dir, rendezvous=rendezvous)
    finally:
        store.set(finished, "1")


def _wait(store: Any, key: str, seconds: float) -> None:
    from torch.distributed import DistStoreError

    try:
        store.wait([key], timedelta(seconds=seconds))
    except DistStoreError:
        return
