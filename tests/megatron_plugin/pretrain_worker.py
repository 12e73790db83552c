"""One rank of examples/pretrain_gpt.py with the plug-in, on fixed batches.

Only the generators and the orchestrator are replaced: Megatron's `pretrain`, its schedules and
optimizers, the plug-in and the publishing of weights are real. Rank 0 writes what it saw.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trainer.cases import batch, gradients

ROOT = Path(__file__).parents[2]
STEPS = 3
# What a machine without a GPU needs (docs/pretraining.md).
CPU = """
  --transformer-impl local --distributed-backend gloo --no-rope-fusion --no-persist-layer-norm
  --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
  --no-bias-dropout-fusion --use-cpu-initialization
"""


class FixedBatches:
    """The orchestrator's connection: the same batches in every layout."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.rows: list[dict[str, float]] = []
        self.announced: list[int] = []

    def announce(self, manifest: Any, _: float) -> None:
        self.announced.append(manifest.version)

    def next_batch(self, step: int) -> Any:
        return batch(step, seed=step, **FIELDS)

    def send(self, message: Any) -> None:
        if hasattr(message, "metrics"):
            self.rows.append(message.metrics)

    def close(self) -> None: ...


FIELDS: dict[str, Any] = {}


class NoOrchestrator:
    endpoint = "none"

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def ended(self) -> bool:
        return False

    def wait(self, _: float) -> None: ...


def main(rank: int, folder: Path) -> None:
    case = json.loads((folder / "case.json").read_text())
    FIELDS.update({k: bytes.fromhex(v) for k, v in case.get("fields", {}).items()})
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(case["ranks"] + 1),  # and a generator
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(case["port"]),
    }
    torch.set_num_threads(1)
    join = importlib.import_module("megatron_rl.megatron_plugin.join")
    steps = importlib.import_module("megatron_rl.megatron_plugin.data_iterator")
    from megatron.training import training

    from megatron_rl.trainer import client
    from megatron_rl.trainer.hf_checkpoint import save_huggingface

    training.has_nvidia_modelopt = False  # 0.18's wheel lacks what it imports then
    join.connect_store = lambda _: dist.HashStore()
    join.OrchestratorProcess, client.TrainerClient = NoOrchestrator, FixedBatches
    client.show_life = FixedBatches
    out: dict[str, Any] = {"norms": [], "rows": []}

    start = join.PretrainingPlugin._start

    def start_with_weights(self: Any, config: Any, args: Any) -> Any:
        made = start(self, config, args)
        made.model.load_huggingface(case["model"])
        return made

    join.PretrainingPlugin._start = start_with_weights
    trained, finish = steps.PluginSteps.trained, steps.PluginSteps.finish

    def observed(self: Any) -> None:
        if case.get("gradients") and self._step == 0:
            whole = gradients(self.model)  # on every rank
            if rank == 0:
                torch.save(whole, folder / "gradients.pt")
        trained(self)
        if rank == 0:
            out["rows"] = self.client.rows

    def finish_and_save(self: Any, chunks: Any) -> None:
        finish(self, chunks)
        save_huggingface(self.model, folder / "weights", case["model"])
        if rank == 0:
            out["announced"] = self.client.announced

    steps.PluginSteps.trained, steps.PluginSteps.finish = observed, finish_and_save
    train_step = training.train_step

    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        out["norms"].append(float(result[5]))
        return result

    training.train_step = recorded
    sys.argv = [
        "pretrain_gpt.py",
        *case["arguments"],
        *CPU.split(),
        "--rl-config",
        str(folder / "rl.yaml"),
    ]
    runpy.run_path(str(ROOT / "examples/pretrain_gpt.py"), run_name="__main__")
    if rank == 0:
        (folder / "out.json").write_text(json.dumps(out))
