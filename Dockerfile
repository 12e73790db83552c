# Trainer and generators on GPUs, in one image and two environments.
#
#   docker build --tag megatron_rl .
#   docker run --rm --gpus all --ipc host megatron_rl megatron-rl doctor
#
# The trainer uses the Python of NVIDIA's PyTorch image, with its torch and Transformer Engine. The
# generators use /opt/generator, with the torch that vLLM was built for. Both load the image's
# libnccl. Every package is pinned by version and hash in docker/*.lock (written by docker/lock.sh);
# nothing else is downloaded, and no apt package is needed. The steps are in docker/steps.sh.
#
# NGC_TAG must be an image with Python 3.12 and torch 2.10 or later. For a reproducible build, pin it
# by digest: --build-arg NGC_TAG=26.05-py3@sha256:...
ARG NGC_IMAGE=nvcr.io/nvidia/pytorch
ARG NGC_TAG=26.05-py3
FROM ${NGC_IMAGE}:${NGC_TAG}

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PYTHON=/usr/bin/python3 \
    GENERATOR=/opt/generator \
    UV_HOME=/opt/uv \
    SYSTEM_NCCL=/usr/lib/x86_64-linux-gnu/libnccl.so.2
WORKDIR /opt/megatron_rl

COPY docker/steps.sh docker/uv.lock docker/trainer.lock docker/generator.lock docker/
RUN docker/steps.sh uv trainer generator nccl

COPY setup.py pyproject.toml README.md LICENSE constraints.txt ./
COPY tools tools
COPY examples examples
COPY megatron_rl megatron_rl
# The image's nvcc compiles the kernels for sm_80, sm_90a and sm_100; this needs no GPU.
RUN MEGATRON_RL_BUILD_CUDA=1 docker/steps.sh wheel package check

ENV MEGATRON_RL_GENERATOR_PYTHON=/opt/generator/bin/python \
    VLLM_NCCL_SO_PATH=/usr/lib/x86_64-linux-gnu/libnccl.so.2 \
    HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1
RUN useradd --create-home --uid 10001 --shell /bin/bash rl && \
    install -d -o rl -g rl /workspace/runs
USER 10001
WORKDIR /workspace
# Port 0: a run on this node may be using the rendezvous port.
HEALTHCHECK --interval=5m --timeout=120s --start-period=2m --retries=3 \
    CMD ["megatron-rl", "doctor", "--quick", "--port", "0"]
CMD ["megatron-rl", "doctor"]
