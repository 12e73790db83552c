#!/usr/bin/env bash
# Make .venv with everything that the demo, the tests and the linters need; a second call is quick.
# On a GPU node: EXTRAS=cuda,dev bash scripts/setup.sh
#
# Requirements: any python3 >= 3.8 with pip (to fetch uv), Python 3.12 or 3.13, a C++ compiler.
# Variables:
#   PYTHON          interpreter for .venv (default: the first one found)
#   VENV            folder of the environment (default: .venv)
#   EXTRAS          extras of setup.py (default: cpu,dev)
#   TORCH_INDEX     package index with PyTorch's own CPU wheels, which are far smaller
#   OTHER_MEGATRON  second version of megatron-core, installed into $VENV-megatron-<version>, for
#                   make test-other-megatron
#   OTHER_TORCH     second version of torch, installed into $VENV-torch-<version>, for a kernel test
# The package index is uv's or pip's own setting (UV_DEFAULT_INDEX, PIP_INDEX_URL, pip's files).
set -euo pipefail
cd "$(dirname "$0")/.."

export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} UV_PYTHON_DOWNLOADS=never
VENV=${VENV:-.venv}
EXTRAS=${EXTRAS:-cpu,dev}
TORCH_INDEX=${TORCH_INDEX:-}
OTHER_TORCH=${OTHER_TORCH:-}
OTHER_MEGATRON=${OTHER_MEGATRON:-}
BOOTSTRAP=.bootstrap
STAMP=$VENV/.installed
INPUTS="setup.py pyproject.toml constraints.txt overrides.txt scripts/setup.sh"

fail() {
  printf 'make setup: %s\n' "$*" >&2
  exit 1
}

version_of() { # print major.minor of a working interpreter, nothing otherwise
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null || true
}

# Run every candidate: a name on PATH can be a pyenv shim of a version that is not selected.
find_python() { # find_python VERSION...: print the first working interpreter of these versions
  local wanted candidate
  for wanted in "$@"; do
    for candidate in "python$wanted" python3 python \
      "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$wanted"*/bin/python \
      /opt/*/bin/"python$wanted" /usr/local/bin/"python$wanted" /usr/bin/"python$wanted" \
      /opt/homebrew/bin/"python$wanted" \
      "${UV:+$("$UV" python find --no-project "$wanted" 2>/dev/null || true)}"; do
      if [ -n "$candidate" ] && [ "$(version_of "$candidate")" = "$wanted" ]; then
        "$candidate" -c 'import sys; print(sys.executable)'
        return
      fi
    done
  done
  return 1
}

find_uv() { # set UV: the one on PATH, or install it into .bootstrap
  if UV=$(command -v uv); then return; fi
  UV=$PWD/$BOOTSTRAP/bin/uv
  if [ -x "$UV" ]; then return; fi
  local python pinned
  python=$(find_python 3.12 3.13 3.11 3.10 3.9 3.8) ||
    fail "no working python3 >= 3.8 is on PATH: install one with pip (Debian, Ubuntu:" \
      "apt install python3 python3-pip python3-venv)"
  pinned=$(grep '^uv==' constraints.txt)
  echo "make setup: fetching $pinned with $python"
  # Debian without python3-venv has no ensurepip, so no venv, but may have pip.
  if "$python" -m venv "$BOOTSTRAP" >/dev/null 2>&1; then
    "$BOOTSTRAP/bin/python" -m pip install --quiet "$pinned"
  else
    rm -rf "$BOOTSTRAP"
    "$python" -m pip install --quiet --target "$BOOTSTRAP" "$pinned"
  fi || fail "$pinned could not be installed by $python -m pip: see pip's message above;" \
    "or put uv on PATH yourself"
}

# Checksum of everything the environment is made from; a change triggers a new installation.
# shellcheck disable=SC2086
fingerprint() { { cat $INPUTS; echo "$EXTRAS|$TORCH_INDEX|$OTHER_TORCH|$OTHER_MEGATRON|${PYTHON:-}|$PWD"; } | cksum; }

if [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$(fingerprint)" ]; then
  exit 0
fi

find_uv
if [ -n "${PYTHON:-}" ]; then
  case $(version_of "$PYTHON") in
  3.12 | 3.13) ;;
  *) fail "PYTHON=$PYTHON is not a working Python 3.12 (or 3.13)" ;;
  esac
else
  PYTHON_FOUND=$(find_python 3.12 3.13) || fail "Python 3.12 was not found (on PATH, in pyenv, /opt," \
    "/usr/local, or among uv's own). Install one of: the package python3.12 with python3.12-dev of" \
    "your system, 'pyenv install 3.12', or '$UV python install 3.12'; or name one: make setup PYTHON=..."
fi
PYTHON_USED=${PYTHON:-$PYTHON_FOUND}
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
  fail "no C++ compiler is on PATH (c++, g++, clang++): install one (Debian, Ubuntu: apt install g++)"

if [ "$(version_of "$VENV/bin/python")" != "$(version_of "$PYTHON_USED")" ]; then
  rm -rf "$VENV"
  "$UV" venv --quiet --no-project --python "$PYTHON_USED" "$VENV"
fi
rm -f "$STAMP"

# uv does not read pip's configuration files: pass pip's index on, so that its mirror is used.
if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
  mirror=${PIP_INDEX_URL:-$("$PYTHON_USED" -m pip config get global.index-url 2>/dev/null || true)}
  if [ -n "$mirror" ]; then export UV_DEFAULT_INDEX=$mirror; fi
fi

arguments=(--python "$VENV/bin/python")
if [ -n "$TORCH_INDEX" ]; then
  arguments+=(--index "$TORCH_INDEX" --index-strategy unsafe-best-match)
fi
echo "make setup: installing megatron_rl[$EXTRAS] into $VENV ($("$VENV/bin/python" --version))"
pinned=("${arguments[@]}" --constraint constraints.txt)
case $EXTRAS in *cpu*) pinned+=(--override overrides.txt) ;; esac
case $EXTRAS in
*cuda*) # Transformer Engine's extension is compiled against the torch that is there: docs/install.md
  export NVTE_BUILD_USE_NVIDIA_WHEELS=1
  "$UV" pip install "${pinned[@]}" torch nvidia-cuda-crt setuptools wheel packaging pip
  pinned+=(--no-build-isolation-package transformer-engine-torch)
  pinned+=(--refresh-package transformer-engine-torch) # the cache may have another torch's
  ;;
esac
MEGATRON_RL_BUILD_CUDA=0 "$UV" pip install "${pinned[@]}" --editable ".[$EXTRAS]"

# The isolated build above had no torch, so the kernels are compiled now.
case $EXTRAS in *cuda*) ;; *) export MEGATRON_RL_BUILD_CUDA=${MEGATRON_RL_BUILD_CUDA:-0} ;; esac
"$VENV/bin/python" -m megatron_rl.kernels.build --install

if [ -n "$OTHER_TORCH" ] && [ ! -d "$VENV-torch-$OTHER_TORCH" ]; then
  echo "make setup: installing torch $OTHER_TORCH, alone, into $VENV-torch-$OTHER_TORCH"
  # uv creates the folder even if the installation fails.
  "$UV" pip install "${arguments[@]}" --no-deps --target "$VENV-torch-$OTHER_TORCH" \
    "torch==$OTHER_TORCH" || { rm -rf "$VENV-torch-$OTHER_TORCH" && fail "no torch $OTHER_TORCH"; }
fi
if [ -n "$OTHER_MEGATRON" ]; then
  echo "make setup: installing megatron-core $OTHER_MEGATRON, alone, into $VENV-megatron-$OTHER_MEGATRON"
  rm -rf "$VENV-megatron-$OTHER_MEGATRON"
  "$UV" pip install "${arguments[@]}" --no-deps --target "$VENV-megatron-$OTHER_MEGATRON" \
    "megatron-core==$OTHER_MEGATRON" || fail "no megatron-core $OTHER_MEGATRON"
fi
fingerprint >"$STAMP"
