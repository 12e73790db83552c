#!/usr/bin/env bash
"exec" "${PYTHON:-python3}" "$0" "$@" # bash hands over to Python, where this line is a string
# ScaleRL on the text model of Llama-4 Scout (17Bx16) on 80 GPUs: 16 train, 64 generate.
#
#   bash examples/scalerl_scout.sh --dry-run     # configuration, roles, memory; starts nothing
#   torchrun examples/scalerl_scout.sh           # needs GPUs; on one node: an error with the count
#
# The dry run ends with the command to type on every node. Under a torchrun with one rank per node
# the script starts one rank per GPU itself. For other GPUs,
# `megatron-rl plan examples/scalerl_scout.yaml --roles.gpu_gib 80 --roles.gpus_per_node 8` proposes
# a layout; its options can follow here. Eight GPUs are too few to train Scout with AdamW in any
# layout.
import sys
from pathlib import Path

from megatron_rl.cli import main

if __name__ == "__main__":
    main(["train", "--config", str(Path(__file__).with_suffix(".yaml")), *sys.argv[1:]])
