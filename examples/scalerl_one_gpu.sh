#!/usr/bin/env bash
"exec" "${PYTHON:-python3}" "$0" "$@" # bash hands over to Python, where this line is a string
# ScaleRL on one GPU: a Megatron trainer and a vLLM generator share it. Without a GPU, on the CPU.
#
#   bash examples/scalerl_one_gpu.sh                         # a tiny Qwen3 that it makes itself
#   bash examples/scalerl_one_gpu.sh --precision.params fp32 # on a CPU
#   bash examples/scalerl_one_gpu.sh --start_checkpoint /data/Qwen3-0.6B --roles.gpu_gib 40 \
#     --generation.max_prompt_tokens 256 --generation.thinking_budget_tokens "[1024, 2048]" \
#     --generation.answer_budget_tokens 256 --generation.concurrent_completions 32 \
#     --parallel.recompute full --optimizer.learning_rate 1e-6
#
# Any key of the configuration (scalerl_one_gpu.yaml) can follow as an option.
import sys
from pathlib import Path

from megatron_rl.cli import main

if __name__ == "__main__":
    main(["train", "--config", str(Path(__file__).with_suffix(".yaml")), *sys.argv[1:]])
