"""The generator role of a rank: one vLLM engine, or a device lent to one."""

import contextlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_rl import liveness
from megatron_rl.config import RunConfig
from megatron_rl.files import report_failure
from megatron_rl.generator.cpu_attention import check_head_size
from megatron_rl.generator.serve import run_generator
from megatron_rl.generator.store_keeper import sees_trainer_stores, store_spec
from megatron_rl.weights.store import node_name


def run_generator_rank(config: RunConfig, rank: int, store: Any) -> None:
    """Run a generator rank: the first rank of an engine runs it, the others lend it their device.

    Raises:
        DistStoreError: the trainer did not start within `timeouts.startup_seconds`.
        Exception: what ended the role; torchrun's summary has it, too.
    """
    from torch.distributed import DistStoreError

    width = config.roles.generator_tensor_parallel
    engine, member = divmod(rank - config.roles.trainer_ranks, width)
    finished = f"engine-{engine}-finished"
    if member:
        while not store.check([finished]):
            with contextlib.suppress(DistStoreError):
                store.wait([finished], timedelta(seconds=60))
        return
    liveness.begin(config, "generator", rank)
    try:
        # Before the trainers build the model: `Engine` checks it for every other caller.
        check_head_size(config.start_checkpoint or Path(config.model))
        endpoint, model_dir = (store.get(key).decode() for key in ("orchestrator", "model_dir"))
        node, spec = node_name(), None
        if not sees_trainer_stores(config, os.environ):
            spec = store_spec(config, node, endpoint)
        run_generator(config, engine, rank, endpoint, model_dir, node=node, store=spec)
        liveness.sign("ended")
    except Exception as e:
        report_failure("\n".join([f"{type(e).__name__}: {e}", *getattr(e, "__notes__", ())]))
        raise
    finally:
        store.set(finished, "1")
