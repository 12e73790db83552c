#!/usr/bin/env bash
"exec" "${PYTHON:-python3}" "$0" "$@" # bash hands over to Python, where this line is a string
# ScaleRL on a real pretrained model of 135M parameters, on two CPU cores.
#
#   megatron-rl model fetch smollm2-135m # once
#   bash examples/scalerl_smollm.sh
#   bash examples/scalerl_smollm.sh --model /data/Qwen3-0.6B --output_dir runs/qwen3
#
# Any key of the configuration (scalerl_smollm.yaml) can follow as an option.
import sys
from pathlib import Path

from megatron_rl.cli import main

if __name__ == "__main__":
    main(["train", "--config", str(Path(__file__).with_suffix(".yaml")), *sys.argv[1:]])
