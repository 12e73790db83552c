"""Megatron-Core without Transformer Engine and Apex: checkpoints of torch's Adam.

    python megatron_core_torch_adam_checkpoint.py    # exit status 1 with a fault, 0 without

One process. Optimizers that took 0 and 3 steps are saved and loaded into fresh ones, with the plain
fp32 optimizer and the distributed one; after one more step, every parameter must have counted one
step more, and be what it would be without the interruption. Where there is no CUDA, `megatron_rl`
stands in for it (`compat.megatron_cpu`).
"""

import copy
import os
import sys
import tempfile

import torch

if not torch.cuda.is_available():
    from megatron_rl.compat import megatron_cpu

    megatron_cpu.install()

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MegatronModule, TransformerConfig

WIDTH = 8
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Model(MegatronModule):
    def __init__(self, config):
        super().__init__(config)
        self.first, self.second = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        return self.second(self.first(x))


def build(start, distributed):
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    module = Model(config).to(DEVICE)
    module.load_state_dict(start)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    model = DistributedDataParallel(config=config, ddp_config=ddp, module=module)
    settings = OptimizerConfig(
        optimizer="adam", lr=0.01, use_distributed_optimizer=distributed, clip_grad=0.0
    )
    return model, get_megatron_optimizer(settings, [model])


def step(model, optimizer, number):
    torch.manual_seed(number)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    model(torch.randn(4, WIDTH, device=DEVICE)).square().sum().backward()
    model.finish_grad_sync()
    assert optimizer.step()[0]


def state(model, optimizer, is_loading):
    weights = model.module.sharded_state_dict()
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(
            copy.copy(weights), is_loading=is_loading, metadata=METADATA
        ),
    }


def adam_steps(optimizer):
    return {
        float(s["step"])
        for chained in optimizer.chained_optimizers
        for s in chained.optimizer.state.values()
    }


def faults_of(steps, distributed, folder):
    torch.manual_seed(0)
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    start = Model(config).state_dict()
    model, optimizer = build(start, distributed)
    for number in range(steps):
        step(model, optimizer, number)
    dist_checkpointing.save(state(model, optimizer, False), folder)
    other, fresh = build(start, distributed)
    loaded = dist_checkpointing.load(state(other, fresh, True), folder)
    other.module.load_state_dict(loaded["model"])
    fresh.load_state_dict(loaded["optimizer"])
    for pair in ((model, optimizer), (other, fresh)):
        step(*pair, steps)
    if adam_steps(fresh) != {steps + 1.0}:
        yield f"Adam counts {sorted(adam_steps(fresh))} steps instead of {steps + 1}"
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    if (difference := max((a - b).abs().max().item() for a, b in pairs)) > 1e-7:
        yield f"parameters differ by {difference:.3g} after a resumed step"


def main() -> int:
    os.environ.update(MASTER_ADDR="127.0.0.1")
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "nccl" if DEVICE == "cuda" else "gloo",
            init_method=f"file://{folder}/rendezvous", rank=0, world_size=1,
        )  # fmt: skip
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        for distributed in (False, True):
            for steps in (0, 3):
                name = f"{'distributed' if distributed else 'fp32'} optimizer, {steps} steps"
                path = f"{folder}/{distributed}_{steps}"
                os.mkdir(path)
                try:
                    faults = list(faults_of(steps, distributed, path))
                except (AssertionError, KeyError, RuntimeError) as e:
                    faults = [f"{type(e).__name__}: {e}"]
                except dist_checkpointing.core.CheckpointingException as e:
                    faults = [f"{type(e).__name__}: {e}"]
                print(f"{name}: {'; '.join(faults) or 'right'}")
                found += len(faults)
    if found:
        print("FAULT: checkpoints of torch's Adam cannot be resumed exactly")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
