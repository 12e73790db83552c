#!/usr/bin/env bash
"exec" "${PYTHON:-python3}" "$0" "$@" # bash hands over to Python, where this line is a string
# A tiny model learns to use a tool over several turns: a trainer and a vLLM generator on a CPU.
#
#   bash examples/scalerl_tools_tiny.sh                      # starts torchrun with 2 ranks itself
#   torchrun --nproc-per-node 2 examples/scalerl_tools_tiny.sh
#   bash examples/scalerl_tools_tiny.sh --schedule.steps 40 --output_dir runs/try
#
# Any key of the configuration (scalerl_tools_tiny.yaml) can follow as an option.
import sys
from pathlib import Path

from megatron_rl.cli import main

if __name__ == "__main__":
    main(["train", "--config", str(Path(__file__).with_suffix(".yaml")), *sys.argv[1:]])
