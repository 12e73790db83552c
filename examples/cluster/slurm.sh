#!/usr/bin/env bash
#SBATCH --job-name=megatron_rl
#SBATCH --nodes=10
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@600
#SBATCH --output=%x-%j.log
# One torchrun per node, one rendezvous, restarts from the newest checkpoint:
#
#   sbatch examples/cluster/slurm.sh my_run.yaml                     # needs GPUs
#   sbatch --nodes=5 examples/cluster/slurm.sh my_run.yaml           # needs GPUs
#   DRY_RUN=1 bash examples/cluster/slurm.sh my_run.yaml --seed 7    # prints the command of a node
#
# In my_run.yaml, roles.trainer_ranks + roles.generator_ranks = nodes x 8. OUTPUT_DIR (default
# runs/JOB) is on a file system that all nodes share. /dev/shm of each node holds two versions of
# the weights (megatron-rl plan). Further arguments are configuration keys. megatron_rl comes from
# the active environment, or from IMAGE (with pyxis).
#
# After a failed rank, torchrun restarts all ranks from the newest checkpoint, up to MAX_RESTARTS
# times. After a lost node, the others wait REJOIN_SECONDS for it or a replacement; then the job
# ends and SLURM requeues it. Ten minutes before the time limit, SLURM's signal triggers a
# checkpoint.
#
# The doctor says, before torchrun, whether the nodes can run. While it runs, the job asks every
# ALIVE_SECONDS (default 600) what rank 0 did last (`megatron-rl alive`); after three silent answers
# its ranks hang: the job is requeued, and resumes.
set -euo pipefail
if [ $# -lt 1 ]; then
  echo "usage: sbatch $0 CONFIG [--key value ...]" >&2
  exit 2
fi
config=$1
shift

nodes=${SLURM_JOB_NUM_NODES:-1}
gpus=${SLURM_GPUS_ON_NODE:-8}
port=${RENDEZVOUS_PORT:-29500}
head=localhost
if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
  read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
fi
output=${OUTPUT_DIR:-runs/${SLURM_JOB_ID:-local}}
# A requeued job, or a new job on an old folder, resumes.
resume=()
if [ -e "$output/checkpoints/latest.json" ]; then resume=(--resume); fi

command=(
  torchrun
  "--nnodes=$nodes" "--nproc-per-node=$gpus"
  --rdzv-backend=c10d "--rdzv-endpoint=$head:$port" "--rdzv-id=${SLURM_JOB_ID:-0}"
  "--rdzv-conf=join_timeout=${REJOIN_SECONDS:-900}" "--max-restarts=${MAX_RESTARTS:-3}"
  -m megatron_rl.cli train --config "$config"
  --output_dir "$output" "${resume[@]}" "$@"
)
if [ "${DRY_RUN:-0}" = 1 ]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi

container=()
if [ -n "${IMAGE:-}" ]; then
  # Compiled kernels and graphs, and what comes from the Hub, outlive the container.
  cache=${CACHE_DIR:-$HOME/.cache}
  mkdir -p "$cache"
  container=("--container-image=$IMAGE" "--container-workdir=$PWD"
    "--container-mounts=$PWD:$PWD,$cache:/home/rl/.cache")
fi
srun --kill-on-bad-exit=1 "${container[@]}" megatron-rl doctor --config "$config" --port "$port"
# SLURM signals this shell only: pass it on, and wait until the step has written its checkpoint.
srun --kill-on-bad-exit=1 "${container[@]}" "${command[@]}" &
step=$!
trap 'kill -TERM "$step"' TERM
watch() {
  local silent=0
  while ! read -rt "${ALIVE_SECONDS:-600}" <> <(:); do # a sleep that leaves no process
    if srun --overlap --nodes=1 --ntasks=1 "${container[@]}" megatron-rl alive "$output"; then
      silent=0
    elif ((++silent == 3)); then
      scontrol requeue "${SLURM_JOB_ID:-}"
    fi
  done
}
watch &
watcher=$!
while wait "$step" && status=0 || status=$?; kill -0 "$step" 2>/dev/null; do :; done
kill "$watcher" 2>/dev/null || true
exit "$status"
