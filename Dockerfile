# Trainer and generators on GPUs, in one image and two environments.
#
#   docker build --tag megatron_rl --build-arg REVISION="$(git rev-parse HEAD)" .
#   docker run --rm --gpus all --ipc host megatron_rl megatron-rl doctor
#
# The trainer uses the Python of NVIDIA's PyTorch image, with its torch and Transformer Engine. The
# generators use /opt/generator, with the torch that vLLM was built for. Both load the base's
# libnccl. Every package is pinned by version and hash in docker/*.lock (written by docker/lock.sh),
# and so is what builds the few that are published as source. The steps are in docker/steps.sh.
#
# NGC_TAG must be an image with Python 3.12, torch 2.10 to 2.13, and a libnccl that is not older
# than nvidia-nccl-cu13 in docker/generator.lock; the build tests all three. docs/install.md has a
# table of tags, and digests for a reproducible build (NGC_TAG=26.07-py3@sha256:...). x86_64 and
# aarch64 (--platform linux/arm64) are built from the same locks.
#
# Other arguments: INDEX_URL (mirror of the package index), NETWORK ("infiniband", "efa"), VERSION
# and REVISION (labels). Secrets: `ca` (certificates of a site, PEM) and `netrc` (credentials of the
# mirror), as in --secret id=ca,src=site.pem.
#
# The stages and their layers are in the order of their rate of change: a changed Python file builds
# a wheel and installs it, and neither compiles kernels nor installs another package.
ARG NGC_IMAGE=nvcr.io/nvidia/pytorch
ARG NGC_TAG=26.07-py3
FROM ${NGC_IMAGE}:${NGC_TAG} AS base

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PYTHON=/usr/bin/python3 \
    GENERATOR=/opt/generator \
    UV_HOME=/opt/uv
WORKDIR /opt/megatron_rl
ARG INDEX_URL=""
COPY docker/steps.sh docker/tools.lock docker/
RUN --mount=type=secret,id=ca --mount=type=secret,id=netrc docker/steps.sh tools

FROM base AS wheel
# The base's nvcc compiles the kernels for sm_80, sm_90a and sm_100; this needs no GPU.
COPY megatron_rl/kernels/build.py megatron_rl/kernels/build.py
COPY megatron_rl/kernels/csrc megatron_rl/kernels/csrc
RUN docker/steps.sh kernels
COPY setup.py pyproject.toml README.md LICENSE ./
COPY megatron_rl megatron_rl
RUN docker/steps.sh wheel

FROM base
ARG INDEX_URL=""
COPY docker/generator.lock docker/
RUN --mount=type=secret,id=ca --mount=type=secret,id=netrc docker/steps.sh generator nccl imports
COPY docker/trainer.lock docker/
RUN --mount=type=secret,id=ca --mount=type=secret,id=netrc docker/steps.sh trainer
ARG NETWORK=""
RUN docker/steps.sh network
# Any user can write here: a container may be started with the id of the user of a cluster.
RUN useradd --create-home --uid 10001 --shell /bin/bash rl && \
    install -d -m 1777 /home/rl /home/rl/.cache /workspace/runs && \
    ln -s /opt/megatron_rl/examples /workspace/examples
COPY --from=wheel /opt/wheels /opt/wheels
RUN docker/steps.sh package check
COPY LICENSE ./
COPY examples examples

# A volume at /home/rl/.cache keeps what torch, Triton, FlashInfer, vLLM and CUDA compile, and what
# is loaded from the Hub. The base allows TF32 products where fp32 is asked for.
ENV HOME=/home/rl \
    USER=rl \
    TORCHINDUCTOR_CACHE_DIR=/home/rl/.cache/torchinductor \
    TRITON_CACHE_DIR=/home/rl/.cache/triton \
    CUDA_CACHE_PATH=/home/rl/.cache/nv \
    MEGATRON_RL_GENERATOR_PYTHON=/opt/generator/bin/python \
    VLLM_NCCL_SO_PATH=/opt/generator/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2 \
    VLLM_NO_USAGE_STATS=1 \
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0
USER 10001
WORKDIR /workspace
# Healthy: the run in the container makes progress, or there is none.
HEALTHCHECK --interval=1m --timeout=20s --start-period=2m --retries=3 \
    CMD ["megatron-rl", "alive", "--idle-ok"]
CMD ["megatron-rl", "doctor"]

ARG NGC_IMAGE=nvcr.io/nvidia/pytorch
ARG NGC_TAG=26.07-py3
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="megatron_rl" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.licenses="Apache-2.0 AND LicenseRef-NVIDIA-Deep-Learning-Container" \
    org.opencontainers.image.base.name="${NGC_IMAGE}:${NGC_TAG}"
