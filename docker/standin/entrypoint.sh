#!/usr/bin/env bash
# Entry point of the stand-in base: like that of NVIDIA's image, a banner and then the command.
echo "== stand-in for PyTorch of NVIDIA's ${NVIDIA_PYTORCH_VERSION:-?}, not NVIDIA's image =="
if [ $# -eq 0 ]; then exec /bin/bash; fi
exec "$@"
