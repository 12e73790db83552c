#!/usr/bin/env bash
"""exec" "${PYTHON:-python3}" "$0" "$@"
"""
# ScaleRL on Llama-4 Scout (17Bx16), text part: 80 GPUs, of which 16 train and 64 generate.
#
#   bash examples/scalerl_scout.sh --dry-run       # configuration, roles, memory; starts nothing
#   torchrun examples/scalerl_scout.sh             # needs GPUs; on one node: says how many it takes
#
# The last lines of the dry run are what to type on each of the nodes. With one rank per node
# (--nproc-per-node 1) the script starts one for each GPU of the node itself.
#
# For other GPUs, megatron-rl plan examples/scalerl_scout.yaml --gpu-gib 80 --gpus-per-node 8
# proposes a layout, whose options can follow here. No layout trains Scout with AdamW on eight GPUs;
# the plan says why.
import sys
from pathlib import Path

from megatron_rl.cli import main

CONFIG = Path(__file__).resolve().with_suffix(".yaml")

if __name__ == "__main__":
    main(["train", "--config", str(CONFIG), *sys.argv[1:]])
