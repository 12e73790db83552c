#!/usr/bin/env bash
# Write docker/{uv,trainer,generator}.lock: versions and hashes of all packages for the image's
# Python and platform, from the ranges in setup.py. Locked versions are kept while they fit.
#
#   bash docker/lock.sh [FOLDER]     FOLDER: folder of the locks (default: docker)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-docker}
UV=${UV:-uv}

compile() { # compile NAME ARGUMENTS...
  local name=$1
  shift
  "$UV" pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_39 \
    --generate-hashes --no-header --no-annotate --output-file "$folder/$name.lock" "$@"
}

grep '^uv==' constraints.txt | compile uv -
compile trainer setup.py --extra cuda --extra io --extra rewards --extra data \
  --constraint constraints.txt --override docker/trainer.txt
compile generator setup.py --extra cuda --override docker/generator.txt
