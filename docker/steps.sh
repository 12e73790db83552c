#!/usr/bin/env bash
# Steps of the Dockerfile, one argument each, in this order. A failing step ends the build.
#
#   tools      install uv and the build tools of source packages, by hash, into their own folder
#   generator  make the generators' environment: vLLM with the torch that it was built for
#   nccl       let the generators' torch load the base's libnccl, if that is new enough
#   imports    import what is known to break when packages of that environment do not fit
#   trainer    install the trainer's packages next to the base's torch and Transformer Engine
#   network    make NCCL use what NETWORK names: `infiniband`, `efa`, or nothing
#   kernels    compile the kernels (MEGATRON_RL_BUILD_CUDA=1: for sm_80, sm_90a and sm_100)
#   wheel      build megatron_rl with them
#   package    install that wheel in both environments
#   check      both environments start the command; the trainer's versions fit, its kernels load
#
# A site's package index and certificates: INDEX_URL, and the files `ca` (PEM) and `netrc` in
# SECRETS. Both pip and uv use them, next to the certificates of the system.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-/usr/bin/python3}          # the base's interpreter
GENERATOR=${GENERATOR:-/opt/generator}      # the generators' environment
UV_HOME=${UV_HOME:-/opt/uv}
WHEELS=${WHEELS:-/opt/wheels}
SYSTEM_NCCL=${SYSTEM_NCCL:-/usr/lib/$(uname -m)-linux-gnu/libnccl.so.2}
AMAZON=${AMAZON:-/opt/amazon}               # libfabric and its NCCL plug-in in the base
ETC=${ETC:-/etc}
SECRETS=${SECRETS:-/run/secrets}
export MEGATRON_RL_BUILD_CUDA=${MEGATRON_RL_BUILD_CUDA:-1}
export UV_NO_CACHE=${UV_NO_CACHE:-1} UV_PYTHON_DOWNLOADS=never UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
# The image's user cannot write next to the sources: each start would compile all that it imports.
export UV_COMPILE_BYTECODE=${UV_COMPILE_BYTECODE:-1} UV_COMPILE_BYTECODE_TIMEOUT=600
# The base pins packages with this file, but the locks here are complete and hashed.
base_pins=${PIP_CONSTRAINT:-}
unset PIP_CONSTRAINT

export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}
if [[ -n ${INDEX_URL:-} ]]; then export UV_DEFAULT_INDEX=$INDEX_URL PIP_INDEX_URL=$INDEX_URL; fi
if [[ -s $SECRETS/netrc ]]; then export NETRC=$SECRETS/netrc; fi
if [[ -s $SECRETS/ca ]]; then
  certificates=$(mktemp)
  trap 'rm -f "$certificates"' EXIT
  system=${SSL_CERT_FILE:-$ETC/ssl/certs/ca-certificates.crt}
  { if [[ -s $system ]]; then cat "$system"; fi; cat "$SECRETS/ca"; } >"$certificates"
  export SSL_CERT_FILE=$certificates PIP_CERT=$certificates
fi

fail() {
  echo "$0: $*" >&2
  exit 1
}

# Builds find the tools' setuptools by PYTHONPATH: without isolation, nothing else is downloaded.
uv() { PYTHONPATH=$UV_HOME "$PYTHON" -m uv "$@"; }
into() { # into PYTHON ARGUMENTS...
  local python=$1
  shift
  uv pip install --python "$python" --break-system-packages --no-deps --no-build-isolation "$@"
}
# -P: the installed package, not the one in the current folder
imports() { "$1" -P -c "import $2" || fail "$1 cannot import $2"; }
locked() { grep -q "^$1==" "$here/generator.lock"; }

generator() {
  uv venv --quiet --no-project --python "$PYTHON" "$GENERATOR"
  # All of these are published as wheels.
  into "$GENERATOR/bin/python" --no-build --require-hashes -r "$here/generator.lock"
}

nccl() {
  local library
  [[ -e $SYSTEM_NCCL ]] || fail "no libnccl at $SYSTEM_NCCL: set SYSTEM_NCCL"
  library=$(find "$GENERATOR/lib" -path '*nvidia/nccl/lib/libnccl.so.2' -print -quit)
  [[ -n $library ]] || fail "no libnccl in $GENERATOR"
  # A torch needs the functions of the libnccl that it was built with, or newer ones.
  "$GENERATOR/bin/python" -P - "$SYSTEM_NCCL" <<'PY'
import ctypes, importlib.metadata, sys
number = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number))
n = number.value
has = (n // 10000, n // 100 % 100, n % 100)
wanted = importlib.metadata.version("nvidia-nccl-cu13")
if has < tuple(map(int, wanted.split(".")[:3])):
    sys.exit(f"{sys.argv[1]} is {'.'.join(map(str, has))}, and the generators' torch needs"
             f" {wanted} or newer: choose a newer NGC_TAG")
PY
  ln -sf "$SYSTEM_NCCL" "$library"
}

trainer() {
  into "$PYTHON" --require-hashes -r "$here/trainer.lock"
  [[ -n $base_pins ]] || return 0
  # `pip install` in the image obeys the base's pins: those of the lock take the place of theirs.
  "$PYTHON" -P - "$base_pins" "$here/trainer.lock" <<'PY'
import pathlib, re, sys
def pins(path):
    for line in pathlib.Path(path).read_text().splitlines():
        if match := re.match(r"[A-Za-z0-9][\w.-]*", line):
            yield re.sub("[-_.]+", "-", match[0]).lower(), line.split(" \\")[0]
own = dict(pins(sys.argv[2]))
lines = [line for name, line in pins(sys.argv[1]) if name not in own] + list(own.values())
pathlib.Path(sys.argv[1]).write_text("\n".join(lines) + "\n")
PY
}

first() { # first FOLDER PATTERN: print the first file with such a name, if there is one
  if [[ -d $1 ]]; then find "$1" -name "$2" | sort | sed -n 1p; fi
}
loads() { # loads LIBRARY: the dynamic linker finds it
  "$PYTHON" -P -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" 2>/dev/null
}

network() {
  local name plugin fabric
  for name in ${NETWORK:-}; do
    case $name in
    infiniband)
      if ! loads libibverbs.so.1 || ! loads librdmacm.so.1; then
        apt-get update --quiet=2
        apt-get install --quiet=2 --no-install-recommends \
          ibverbs-providers libibverbs1 librdmacm1
        rm -rf /var/lib/apt/lists/*
      fi
      if ! loads libibverbs.so.1 || ! loads librdmacm.so.1; then
        fail "the base has no usable libibverbs and librdmacm"
      fi
      ;;
    efa)
      fabric=$(first "$AMAZON" 'libfabric.so.1')
      plugin=$(first "$AMAZON" 'libnccl-net*.so')
      if [[ -z $fabric || -z $plugin ]]; then
        fail "no libfabric and NCCL plug-in in $AMAZON: install them in the base, or drop efa"
      fi
      dirname "$fabric" >"$ETC/ld.so.conf.d/efa.conf"
      ldconfig
      loads libfabric.so.1 || fail "$fabric does not load"
      # Without a name NCCL may take another plug-in, or use sockets without a word.
      printf 'NCCL_NET_PLUGIN=%s\n' "$plugin" >>"$ETC/nccl.conf"
      ;;
    *) fail "NETWORK is '$NETWORK': infiniband and efa are known" ;;
    esac
  done
}

check() {
  local python
  for python in "$PYTHON" "$GENERATOR/bin/python"; do
    "$python" -P -m megatron_rl.cli config >/dev/null
  done
  # One process, as torch takes long to import: `imports` has tried the generators'.
  "$PYTHON" -P - "$here/trainer.lock" <<'PY'
import os, pathlib, re, sys
from importlib.metadata import version
from megatron_rl.commands.doctor.software_checks import check_versions
from megatron_rl.kernels import build, library
pins = re.findall(r"(?m)^([\w.-]+)==(\S+)", pathlib.Path(sys.argv[1]).read_text())
wrong = [f"{name}: {version(name)}, not {pin}" for name, pin in pins if version(name) != pin]
lines = check_versions({}, cuda=True).items()
wrong += [f"{name}: {line.detail}" for name, line in lines if line.status == "fail"]
kernels = library.load()
if kernels.path != build.INSTALLED / build.library_name(os.environ["MEGATRON_RL_BUILD_CUDA"] == "1"):
    wrong += [f"not the kernels that were compiled: {kernels}"]
if wrong:
    sys.exit("\n".join(wrong))
PY
}

for step in "$@"; do
  echo "==> $step"
  case $step in
  tools)
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' ||
      fail "$PYTHON is not Python 3.12, for which the packages are locked"
    "$PYTHON" -m pip install --quiet --no-cache-dir --no-deps --require-hashes \
      --only-binary :all: --target "$UV_HOME" -r "$here/tools.lock"
    ;;
  imports)
    # CUDA's Python packages fail at import when two of them own the same files.
    if locked torch; then imports "$GENERATOR/bin/python" torch; fi
    if locked nvidia-cutlass-dsl; then imports "$GENERATOR/bin/python" cutlass; fi
    if locked flashinfer-python; then imports "$GENERATOR/bin/python" flashinfer; fi
    ;;
  kernels) "$PYTHON" -P "$here/../megatron_rl/kernels/build.py" --install ;;
  wheel)
    uv build --quiet --wheel --no-build-isolation --python "$PYTHON" --out-dir "$WHEELS" "$here/.."
    ;;
  package)
    into "$PYTHON" "$WHEELS"/megatron_rl-*.whl
    into "$GENERATOR/bin/python" "$WHEELS"/megatron_rl-*.whl
    ;;
  generator | nccl | trainer | network | check) "$step" ;;
  *)
    echo "$0: unknown step $step" >&2
    exit 2
    ;;
  esac
done
