#!/usr/bin/env bash
"""exec" "${PYTHON:-python3}" "$0" "$@"
"""
# ScaleRL on an 8B dense model (Llama 3.1): 80 GPUs, of which 16 train and 64 generate; or one node.
#
#   bash examples/scalerl_8b.sh --dry-run              # configuration, roles, memory; starts nothing
#   bash examples/scalerl_8b.sh --one-node --dry-run   # the same for a node of 8 GPUs with 80 GiB
#   torchrun examples/scalerl_8b.sh --one-node --start_checkpoint /data/8b   # needs GPUs
#
# The last lines of the dry run are what to type on each of the nodes. With one rank per node
# (--nproc-per-node 1) the script starts one for each GPU of the node itself.
#
# For other GPUs, megatron-rl plan examples/scalerl_8b.yaml --gpu-gib 80 --gpus-per-node 8 proposes
# a layout, whose options can follow here.
import sys
from pathlib import Path

from megatron_rl.cli import main

EXAMPLES = Path(__file__).resolve().parent
ONE_NODE = "--one-node"

if __name__ == "__main__":
    rest = [argument for argument in sys.argv[1:] if argument != ONE_NODE]
    name = "scalerl_8b_node.yaml" if ONE_NODE in sys.argv else "scalerl_8b.yaml"
    main(["train", "--config", str(EXAMPLES / name), *rest])
