#!/usr/bin/env bash
"""exec" torchrun --nproc-per-node "${NPROC:-3}" "$0" "$@"
"""
# ScaleRL at laptop size: two Megatron trainer ranks and one vLLM generator on a CPU.
#
#   bash examples/scalerl_tiny.sh                              # shell: starts torchrun with 3 ranks
#   torchrun --nproc-per-node 3 examples/scalerl_tiny.sh       # Python: one role per rank
#   torchrun examples/scalerl_tiny.sh                          # one rank: starts the others itself
#   bash examples/scalerl_tiny.sh --model tiny_dense           # the dense model, tensor parallel
#
# Every key of the configuration can follow: --schedule.steps 40 --output_dir runs/try.
import sys
from pathlib import Path

from megatron_rl.cli import main

EXAMPLES = Path(__file__).resolve().parent


def config_for(arguments: list[str]) -> Path:
    """Expert parallel for the MoE, tensor parallel for the dense model."""
    dense = "tiny_dense" in arguments or "--model=tiny_dense" in arguments
    return EXAMPLES / ("scalerl_tiny_dense.yaml" if dense else "scalerl_tiny.yaml")


if __name__ == "__main__":
    main(["train", "--config", str(config_for(sys.argv[1:])), *sys.argv[1:]])
