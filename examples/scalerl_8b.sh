#!/usr/bin/env bash
"""exec" "${PYTHON:-python3}" "$0" "$@"
"""
# ScaleRL on an 8B dense model (Llama 3.1): 80 GPUs, of which 16 train and 64 generate; or one node.
#
#   bash examples/scalerl_8b.sh --dry-run             # no GPU needed: configuration, roles, memory
#   torchrun --nnodes 20 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 \
#     examples/scalerl_8b.sh --start_checkpoint /data/8b           # on each node
#   torchrun examples/scalerl_8b.sh --one-node --start_checkpoint /data/8b   # a node of 8 x 80 GiB
#
# Other GPUs: `megatron-rl plan examples/scalerl_8b.yaml --world 80 --gpu-gib 80 --gpus-per-node 8`
# proposes a layout, and its options can follow here.
import sys
from pathlib import Path

from megatron_rl.cli import main

EXAMPLES = Path(__file__).resolve().parent
ONE_NODE = "--one-node"

if __name__ == "__main__":
    rest = [argument for argument in sys.argv[1:] if argument != ONE_NODE]
    name = "scalerl_8b_node.yaml" if ONE_NODE in sys.argv else "scalerl_8b.yaml"
    main(["train", "--config", str(EXAMPLES / name), *rest])
