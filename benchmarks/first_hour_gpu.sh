#!/usr/bin/env bash
# The first hour on a GPU, in under 12 minutes on one card: installation, tests, kernels, layers of
# Transformer Engine, and a run whose trainer and generator share the card. It needs this repository
# and its environment only. A failed part does not end it; the exit status is 1 then.
#
#   bash benchmarks/first_hour_gpu.sh                  # results: benchmarks/results/CARD-DATE
#   OUT=folder bash benchmarks/first_hour_gpu.sh --only kernels --only run
#   bash benchmarks/first_hour_gpu.sh --dry-run        # the parts; starts nothing
#
# Without a GPU every part runs what it can, or says why not.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=$(command -v "$python" || command -v python3)
exec "$python" benchmarks/first_hour.py "$@"
