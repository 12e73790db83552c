#!/usr/bin/env bash
# Four recipes with two seeds each: within an hour on two cores.
#
#   bash benchmarks/study/run.sh [FOLDER]        the same command continues a killed call
#
# Eight runs of at most 4 minutes of RL, about a minute of start-up each, and a supervised stage of
# two minutes. Table and picture go to benchmarks/results/study.{md,png}
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-runs/four_recipes}
export OMP_NUM_THREADS=1
started=$(date +%s)
megatron-rl study benchmarks/study/four_recipes.yaml --output "$folder"
seconds=$(($(date +%s) - started))
for ending in md png; do
  cp "$folder/comparison.$ending" "benchmarks/results/study.$ending"
done
echo "took $((seconds / 60)) min $((seconds % 60)) s (this call)"
