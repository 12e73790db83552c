"""Megatron-Core 0.18 and 0.19: auxiliary losses of routers where a padding mask leaves tokens out.

    python megatron_core_padded_router_losses.py  # exit status 1 where the fault is, 0 where not

Two processes share a micro-batch (tensor and sequence parallelism). Each one's auxiliary loss is
its part of the micro-batch's, and is multiplied by a token count before the sum over ranks: with
the count of its own tokens, three here and one there, the sum is not the micro-batch's loss. A
micro-batch that has no token but padding divides 0 by 0. Where there is no CUDA, `megatron_rl`
stands in for it (`compat.megatron_cpu`).
"""

import sys
import tempfile

import torch

if not torch.cuda.is_available():
    from megatron_rl.compat import megatron_cpu

    megatron_cpu.install()

RANKS, EXPERTS = 2, 4


def rank_main(rank: int, url: str) -> None:
    from megatron.core.transformer.moe import moe_utils

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend, init_method=url, rank=rank, world_size=RANKS)
    faults = 0
    for tokens in (3 - 2 * rank, 0):
        routing_map = torch.zeros(3, EXPERTS, dtype=torch.bool, device=device)
        routing_map[:tokens, 0] = True
        per_expert, local, total = moe_utils.get_tokens_per_expert_and_token_count(
            routing_map, torch.distributed.group.WORLD, topk=1, with_padding_mask=True
        )
        probs = torch.full((3, EXPERTS), 0.25, device=device) * (tokens > 0)
        loss = moe_utils.switch_load_balancing_loss_func(probs, per_expert, total, 1, EXPERTS, 1.0)
        faults += not bool(torch.isfinite(loss)) or float(local) != (2 if tokens else 0)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.exit(1 if faults else 0)


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
        print("FAULT: padding spoils the routers' auxiliary losses")
        return 1
    print("auxiliary losses are those of the tokens that are not padding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
