#!/usr/bin/env bash
"""exec" "${PYTHON:-python3}" "$0" "$@"
"""
# ScaleRL on Llama-4 Scout (17Bx16), text part: 80 GPUs, of which 16 train and 64 generate.
#
#   bash examples/scalerl_scout.sh --dry-run          # no GPU needed: configuration, roles, memory
#   torchrun --nnodes 20 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 \
#     examples/scalerl_scout.sh --start_checkpoint /data/scout     # on each node
#   torchrun --nnodes 20 ... examples/scalerl_scout.sh             # one rank: starts the node's GPUs
#   torchrun examples/scalerl_scout.sh                # one node: says how many nodes it takes
#
# Other GPUs: `megatron-rl plan examples/scalerl_scout.yaml --world 80 --gpu-gib 80
# --gpus-per-node 8` proposes a layout, and its options can follow here. Eight GPUs do not hold
# Scout with AdamW in any layout; the plan says why.
import sys
from pathlib import Path

from megatron_rl.cli import main

CONFIG = Path(__file__).resolve().with_suffix(".yaml")

if __name__ == "__main__":
    main(["train", "--config", str(CONFIG), *sys.argv[1:]])
