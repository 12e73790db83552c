#!/usr/bin/env bash
# Checks and benchmark of the kernels on one GPU: about 4 minutes on an H200, of which building is
# half a minute. Needs torch, nvcc and this repository; pytest, Transformer Engine, liger-kernel,
# cut-cross-entropy and megatron-core are used where they are installed.
#   PYTHON=python3 OUT=folder-for-results bash benchmarks/kernels_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} out=${OUT:-benchmarks/results}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
status=0

echo "== build"
"$python" -c "from megatron_rl.kernels.library import load; print(load())" || exit 1

echo "== checks"
if "$python" -c "import pytest, hypothesis, pytest_timeout" 2>/dev/null; then
  timeout 100 "$python" -m pytest -q -m gpu tests/kernels || status=1
else
  timeout 100 "$python" -m tests.kernels.gpu_checks || status=1
fi

echo "== benchmark"
timeout 110 "$python" benchmarks/kernels.py --device cuda --rounds 5 \
  --out "$out/kernels_gpu.md" || status=1

echo "== compute-sanitizer"
if command -v compute-sanitizer >/dev/null; then
  timeout 60 compute-sanitizer --error-exitcode 9 "$python" -m tests.kernels.gpu_checks --small \
    | tail -n 3 || status=1
else
  echo "compute-sanitizer is not on PATH: not run"
fi
exit $status
