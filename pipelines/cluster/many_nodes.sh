#!/bin/bash
# One run on several nodes, a rank a GPU:   sbatch many_nodes.sh CONFIG.toml RUN [--set ...]
#
#SBATCH --job-name=dustmap-ranks
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=256G
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
## Edit: partition, account, GPUs.
##SBATCH --partition=gpu
##SBATCH --account=project
##SBATCH --gpus-per-node=4

set -euo pipefail
# shellcheck source=requeue.sh
source "${SLURM_SUBMIT_DIR}/requeue.sh"

config=$1 run=$2
shift 2
memory=${DUSTMAP_MEMORY:-60GiB} # of each rank
command=(dustmap run "$config" --output "$run" --resume
    --threads "${SLURM_CPUS_PER_TASK:-1}" --memory "$memory" "$@")

# What torchrun would set. srun starts the ranks instead, for torchrun turns every exit code into
# 1, and 75 would be lost. On one machine `dustmap run --ranks 4` starts them, and keeps it.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT WORLD_SIZE="$SLURM_NTASKS"
# A rank that ends ends the others by itself; srun must not, or states would be lost half-written.
# shellcheck disable=SC2016 # the variables are those of each task
# Slurm 22.05 to 23.02 does not hand --cpus-per-task of the job on to srun.
ranks=(srun --kill-on-bad-exit=0 --wait=600 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"
    bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"' rank)

plan "${ranks[@]}" "${command[@]}" --dry-run
run_or_requeue "${ranks[@]}" "${command[@]}"
