"""One rank of the doctor's all-reduce: `-m megatron_rl.commands.doctor.rank RANK RANKS URL BACKEND`."""

from __future__ import annotations

import sys
from datetime import timedelta


def main(rank: int, ranks: int, url: str, backend: str) -> None:
    """Add rank + 1 over all ranks.

    Raises:
        RuntimeError: the sum is another one.
    """
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=url, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    value = torch.full((1,), float(rank + 1), device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(value)
    wanted = ranks * (ranks + 1) / 2
    if value.item() != wanted:
        raise RuntimeError(f"the sum is {value.item()}, not {wanted}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
