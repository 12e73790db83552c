#!/usr/bin/env bash
"exec" "${PYTHON:-python3}" "$0" "$@" # bash hands over to Python, where this line is a string
# ScaleRL on an 8B dense model (Llama 3.1) on 80 GPUs: 16 train, 64 generate.
#
#   bash examples/scalerl_8b.sh --dry-run     # configuration, roles, memory; starts nothing
#   torchrun examples/scalerl_8b.sh --start_checkpoint /data/8b                     # needs GPUs
#   megatron-rl train --config examples/scalerl_8b_node.yaml --dry-run              # one node of 8
#
# The dry run ends with the command to type on every node. Under a torchrun with one rank per node
# the script starts one rank per GPU itself. For other GPUs,
# `megatron-rl plan examples/scalerl_8b.yaml --roles.gpu_gib 80 --roles.gpus_per_node 8` proposes a
# layout; its options can follow here.
import sys
from pathlib import Path

from megatron_rl.cli import main

if __name__ == "__main__":
    main(["train", "--config", str(Path(__file__).with_suffix(".yaml")), *sys.argv[1:]])
