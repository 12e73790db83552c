#!/usr/bin/env bash
# Fill an empty folder with the file system of the stand-in base: what the Dockerfile finds in
# NVIDIA's PyTorch image, as far as public packages have it. docker/standin/build.sh calls it.
#
#   PYTHON=... UV=... docker/standin/base.sh FOLDER
#
# PYTHON is a CPython 3.12 in a prefix of its own (pyenv's, uv's), UV is uv. Root is needed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$1
suite=${SUITE:-trixie}      # glibc 2.41; the locks are for glibc 2.39, Ubuntu 24.04's
multiarch=$(uname -m)-linux-gnu
packages=$root/usr/local/lib/python3.12/dist-packages
release=26.07 cuda=13.3 torch=2.13.0a0+9186a08b2c
note() { printf '%4d s base: %s\n' "$SECONDS" "$*"; }

# A package of apt for Python has no RECORD: no installer can remove it. NVIDIA's image has some.
in_the_root="set -e; cd /tmp; apt-get download -qq python3-pyparsing
  dpkg-deb -x python3-pyparsing_*.deb /; rm ./*.deb"
note "Debian $suite"
timeout 900 mmdebstrap --quiet --variant=minbase \
  --include=bash,ca-certificates,g++,make,git,procps,libbz2-1.0,libexpat1,libffi8,liblzma5 \
  --include=libncursesw6,libreadline8t64,libsqlite3-0,libssl3t64,libuuid1,zlib1g,libnuma1 \
  --customize-hook="chroot \"\$1\" sh -c '$in_the_root'" "$suite" "$root" ${MIRROR:+"$MIRROR"}
test -d "$root/usr/lib/python3/dist-packages/pyparsing"

note "CPython of $PYTHON"
prefix=$("$PYTHON" -c 'import sys; print(sys.base_prefix)')
tar -C "$prefix" -c --exclude='*/site-packages/*' --exclude='*/python3.12/test' \
  --exclude='__pycache__' --exclude='*/idlelib' --exclude='*/tkinter' --exclude='*/config-3.12*' \
  bin/python3.12 include/python3.12 lib/python3.12 \
  "$(cd "$prefix" && ls -d lib/libpython3.12.so.1.0)" | tar -x --no-same-owner -C "$root/usr"
ln -s python3.12 "$root/usr/bin/python3"
ln -s python3.12 "$root/usr/bin/python"
ln -s libpython3.12.so.1.0 "$root/usr/lib/libpython3.12.so"
sed -i "s|$prefix|/usr|g" "$root"/usr/lib/python3.12/_sysconfigdata*.py
"$PYTHON" "$here/debian_layout.py" "$root/usr/lib/python3.12"
printf '[externally-managed]\nError=This is the system'"'"'s Python.\n' \
  >"$root/usr/lib/python3.12/EXTERNALLY-MANAGED"

note "packages of base.txt"
UV_LINK_MODE=copy timeout 900 "$UV" pip install --quiet --no-deps --target "$packages" \
  --python "$PYTHON" --python-version 3.12 --python-platform "$(uname -m)-manylinux_2_39" \
  --only-binary :all: -r "$here/base.txt"
rm -r "${packages:?}/bin" # scripts for the interpreter of this machine
printf '#!/bin/sh\nexec /usr/bin/python3 -m pip "$@"\n' >"$root/usr/local/bin/pip"
chmod 755 "$root/usr/local/bin/pip"

note "CUDA to /usr/local/cuda, its other libraries to /usr/lib/$multiarch"
mv "$packages/nvidia/cu13" "$root/usr/local/cuda-$cuda"
ln -s "cuda-$cuda" "$root/usr/local/cuda"
ln -s lib "$root/usr/local/cuda/lib64"
for folder in "$packages"/nvidia/*/; do # cudnn, cusparselt, nccl, nvshmem
  mv "$folder"lib/*.so* "$root/usr/lib/$multiarch/"
  cp -r "$folder"include/. "$root/usr/include/"
done
rm -r "$packages/nvidia" "$packages"/nvidia_c[u]*.dist-info "$packages"/nvidia_nccl*.dist-info \
  "$packages"/nvidia_nv*.dist-info
echo /usr/local/cuda/lib64 >"$root/etc/ld.so.conf.d/cuda.conf"
chroot "$root" ldconfig

note "torch is called $torch.nv$release"
sed -i "s|^__version__ = .*|__version__ = '$torch.nv$release'|; s|^cuda: .*|cuda: Optional[str] = '$cuda'|" \
  "$packages/torch/version.py"
old=$(basename "$packages"/torch-*.dist-info)
version=$torch.nv${release/.0/.} # of the metadata: without zeros at the front
new=torch-$version.dist-info
mv "$packages/$old" "$packages/$new"
sed -i "s|^$old|$new|" "$packages/$new/RECORD"
sed -i "s|^Version: .*|Version: $version|; /^Requires-Dist: \(nvidia\|cuda\|triton\)/d" \
  "$packages/$new/METADATA"

# NVIDIA's image lets pip keep what it was tested with.
mkdir -p "$root/etc/pip" "$root/opt/nvidia" "$root/workspace"
grep -E '^(numpy|nvidia-modelopt|packaging|setuptools|sympy)==' "$here/base.txt" \
  >"$root/etc/pip/constraint.txt"
install -m 755 "$here/entrypoint.sh" "$root/opt/nvidia/nvidia_entrypoint.sh"
chroot "$root" /usr/bin/python3 -c 'import torch; print("base: torch", torch.__version__)'
