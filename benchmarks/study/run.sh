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
took="$((seconds / 60)) min $((seconds % 60)) s"
cp "$folder/comparison.png" benchmarks/results/study.png
{
  echo "# Four recipes with two seeds each on the tiny task"
  echo
  echo "\`bash benchmarks/study/run.sh\`, $(lscpu | sed -n 's/^Model name: *//p'), $(nproc) cores," \
    "$(date +%F); the last call took $took."
  echo
  echo "![Pass rate against training tokens](study.png)"
  echo
  cat "$folder/comparison.md"
} > benchmarks/results/study.md
echo "took $took (this call)"
