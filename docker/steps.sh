#!/usr/bin/env bash
# Steps of the Dockerfile, one argument each, in this order. A failing step ends the build.
#
#   uv         install uv itself, by hash, into its own folder
#   trainer    install the trainer's packages next to the image's torch and Transformer Engine
#   generator  make the generators' environment: vLLM with the torch that it was built for
#   nccl       let the generators' torch load the image's libnccl
#   wheel      build megatron_rl with its kernels (MEGATRON_RL_BUILD_CUDA=1: sm_80, sm_90a, sm_100)
#   package    install that wheel in both environments
#   check      both environments start the command
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-/usr/bin/python3}          # the image's interpreter
GENERATOR=${GENERATOR:-/opt/generator}      # the generators' environment
UV_HOME=${UV_HOME:-/opt/uv}
WHEELS=${WHEELS:-/opt/wheels}
SYSTEM_NCCL=${SYSTEM_NCCL:-/usr/lib/x86_64-linux-gnu/libnccl.so.2}
# NVIDIA's image pins packages with this variable, but the locks here are complete and hashed.
unset PIP_CONSTRAINT
export UV_NO_CACHE=${UV_NO_CACHE:-1} UV_PYTHON_DOWNLOADS=never UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}

uv() { PYTHONPATH=$UV_HOME "$PYTHON" -m uv "$@"; }
into_trainer() { uv pip install --python "$PYTHON" --break-system-packages --no-deps "$@"; }
into_generator() { uv pip install --python "$GENERATOR/bin/python" --no-deps "$@"; }

for step in "$@"; do
  echo "==> $step"
  case $step in
  uv)
    "$PYTHON" -m pip install --quiet --no-cache-dir --no-deps --require-hashes \
      --target "$UV_HOME" -r "$here/uv.lock"
    ;;
  trainer) into_trainer --require-hashes -r "$here/trainer.lock" ;;
  generator)
    uv venv --quiet --no-project --python "$PYTHON" "$GENERATOR"
    into_generator --require-hashes -r "$here/generator.lock"
    ;;
  nccl)
    test -e "$SYSTEM_NCCL" || { echo "no libnccl at $SYSTEM_NCCL" >&2; exit 1; }
    library=$(find "$GENERATOR/lib" -path '*nvidia/nccl/lib/libnccl.so.2' -print -quit)
    test -n "$library" || { echo "no libnccl in $GENERATOR" >&2; exit 1; }
    ln -sf "$SYSTEM_NCCL" "$library"
    ;;
  wheel)
    # No isolation, no download: setuptools comes from the lock, torch's headers from the image.
    uv build --quiet --wheel --no-build-isolation --python "$PYTHON" --out-dir "$WHEELS" "$here/.."
    ;;
  package)
    into_trainer "$WHEELS"/megatron_rl-*.whl
    into_generator "$WHEELS"/megatron_rl-*.whl
    ;;
  check)
    for python in "$PYTHON" "$GENERATOR/bin/python"; do
      "$python" -m megatron_rl.cli config >/dev/null
    done
    ;;
  *)
    echo "$0: unknown step $step" >&2
    exit 2
    ;;
  esac
done
