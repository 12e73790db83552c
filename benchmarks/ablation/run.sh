#!/usr/bin/env bash
# scalerl, grpo and ppo_off_policy_8 with two seeds each: within 40 minutes on two cores.
#
#   bash benchmarks/ablation/run.sh [FOLDER]        the same command continues an interrupted call
#
# Six runs of at most 5 minutes of RL, about a minute of start-up each, and a supervised stage of two
# minutes. Table and picture go to benchmarks/results/ablation.{md,png}
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-runs/ablation}
export OMP_NUM_THREADS=1
started=$(date +%s)
megatron-rl ablate --recipes scalerl,grpo,ppo_off_policy_8 --seeds 2 --minutes 5 --output "$folder"
seconds=$(($(date +%s) - started))
for ending in md png; do
  cp "$folder/comparison.$ending" "benchmarks/results/ablation.$ending"
done
echo "took $((seconds / 60)) min $((seconds % 60)) s (this call)"
