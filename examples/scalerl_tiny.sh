#!/usr/bin/env bash
"exec" "${PYTHON:-python3}" "$0" "$@" # bash hands over to Python, where this line is a string
# ScaleRL at laptop size: two Megatron trainer ranks and one vLLM generator on a CPU.
#
#   bash examples/scalerl_tiny.sh                            # starts torchrun with 3 ranks itself
#   torchrun --nproc-per-node 3 examples/scalerl_tiny.sh     # one role per rank
#   bash examples/scalerl_tiny.sh --schedule.steps 40 --output_dir runs/try
#   bash examples/scalerl_tiny.sh --model tiny_dense --parallel.tensor 2
#
# Any key of the configuration (scalerl_tiny.yaml) can follow as an option.
import sys
from pathlib import Path

from megatron_rl.cli import main

if __name__ == "__main__":
    main(["train", "--config", str(Path(__file__).with_suffix(".yaml")), *sys.argv[1:]])
