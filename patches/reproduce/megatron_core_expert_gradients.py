"""Megatron-Core 0.18: gradients of experts that are replicated over tensor-parallel ranks.

    python megatron_core_expert_gradients.py    # exit status 1 where the fault is, 0 where it is not

Two processes. With tensor parallelism 2, expert tensor parallelism 1 and expert parallelism 1, both
ranks hold all experts, and each sees its own half of the tokens, so that gradients must be summed
over both: `allreduce` False sends them to the experts' data-parallel group. Where there is no CUDA,
`megatron_rl` stands in for it (`compat.megatron_cpu`).
"""

import sys
import tempfile

import torch

if not torch.cuda.is_available():
    from megatron_rl.compat import megatron_cpu

    megatron_cpu.install()

RANKS = 2


def rank_main(rank: int, url: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend, init_method=url, rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=RANKS, expert_tensor_parallel_size=1
    )
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=2,
        tensor_model_parallel_size=RANKS, expert_tensor_parallel_size=1, sequence_parallel=True,
        use_cpu_initialization=True, add_bias_linear=False,
    )  # fmt: skip
    assert parallel_state.get_expert_data_parallel_group().size() == RANKS
    options = dict(config=config, init_method=torch.nn.init.zeros_, bias=False, is_expert=True)
    group = parallel_state.get_expert_tensor_parallel_group()
    column = ColumnParallelLinear(8, 8, tp_group=group, skip_bias_add=True, **options)
    row = RowParallelLinear(
        8, 8, tp_group=group, skip_bias_add=True, input_is_parallel=True, **options
    )
    wrong = [layer for layer in (column, row) if layer.weight.allreduce]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.exit(1 if wrong else 0)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        # CUDA cannot be used in a fork.
        method = "spawn" if torch.cuda.is_available() else "fork"
        context = torch.multiprocessing.get_context(method)
        url = f"file://{folder}/rendezvous"
        ranks = [context.Process(target=rank_main, args=(r, url)) for r in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    codes = {process.exitcode for process in ranks}
    if not codes <= {0, 1}:
        print(f"a rank ended with {codes}")
        return 3
    if 1 in codes:
        print("FAULT: gradients of experts are not summed over the tensor-parallel ranks")
        return 1
    print("gradients of experts are summed over the ranks that hold them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
