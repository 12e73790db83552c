#!/usr/bin/env bash
# Write docker/{tools,trainer,generator}.lock: versions and hashes of all packages for the image's
# Python, from the ranges in setup.py and the versions of constraints.txt.
#
#   bash docker/lock.sh [FOLDER]     FOLDER: folder of the locks (default: docker)
#
# A lock serves x86_64 and aarch64: it has the hashes of every file of a release. Each is resolved
# for both, and the script fails if their versions differ.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-docker}
UV=${UV:-uv}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compile() { # compile NAME ARGUMENTS...
  local name=$1 machine
  shift
  for machine in x86_64 aarch64; do
    "$UV" pip compile --quiet --python-version 3.12 --python-platform "$machine-manylinux_2_39" \
      --constraint constraints.txt --generate-hashes --no-header --no-annotate \
      --output-file "$work/$name.$machine" "$@"
  done
  diff "$work/$name".{x86_64,aarch64} >&2 || {
    echo "$0: $name.lock cannot serve both platforms; pin one version in constraints.txt" >&2
    exit 1
  }
  mv "$work/$name.x86_64" "$folder/$name.lock"
}

# uv, and what builds the packages that are published as source only
printf '%s\n' uv setuptools wheel >"$work/tools.txt"
compile tools "$work/tools.txt"
compile trainer setup.py --extra cuda --extra io --extra rewards --extra data \
  --override docker/trainer.txt
compile generator setup.py --extra cuda --extra environments --override docker/generator.txt
