#!/usr/bin/env bash
#SBATCH --job-name=megatron_rl_generators
#SBATCH --array=0-63
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60
#SBATCH --output=%x-%A_%a.log
# Generators that join a run and leave it as SLURM has GPUs, next to the job of its trainer:
#
#   sbatch --nodes=2 examples/cluster/slurm.sh my_run.yaml --roles.generator_ranks 0   # needs GPUs
#   sbatch examples/cluster/generators_slurm.sh runs/41                                # needs GPUs
#   sbatch --array=0-7 --gpus=4 examples/cluster/generators_slurm.sh runs/41           # needs GPUs
#
# The argument is the OUTPUT_DIR of the run, on a file system that both jobs see, or HOST:PORT of
# its orchestrator (fleet.port). An element of the array is one engine, with as many GPUs as
# roles.generator_tensor_parallel; the rest of its configuration comes from the run.
#
# At SIGTERM (preemption, scancel, a minute before the time limit) a generator hands over its work
# and ends. After an error it is requeued, up to MAX_RESTARTS times (default 10). It waits for a run
# whose trainer is gone for timeouts.rejoin_seconds. At the end of the run it ends with status 0.
set -euo pipefail
if [ $# -ne 1 ]; then
  echo "usage: sbatch $0 OUTPUT_DIR|HOST:PORT" >&2
  exit 2
fi
container=()
if [ -n "${IMAGE:-}" ]; then
  cache=${CACHE_DIR:-$HOME/.cache}
  mkdir -p "$cache"
  container=("--container-image=$IMAGE" "--container-workdir=$PWD"
    "--container-mounts=$PWD:$PWD,$cache:/home/rl/.cache")
fi
# The name stays over requeues: the run knows at once that the earlier process is gone.
name=generator-${SLURM_ARRAY_JOB_ID:-local}-${SLURM_ARRAY_TASK_ID:-0}
srun "${container[@]}" megatron-rl generate --join "$1" --name "$name" &
step=$!
asked=0
trap 'asked=1; kill -TERM "$step"' TERM
while wait "$step" && status=0 || status=$?; kill -0 "$step" 2>/dev/null; do :; done
if ((status != 0 && !asked && ${SLURM_RESTART_COUNT:-0} < ${MAX_RESTARTS:-10})); then
  scontrol requeue "${SLURM_JOB_ID:-}"
fi
exit "$status"
