#!/bin/bash
# The tile NSIDE/TASK of a sky, in RUNS/NSIDE-TASK. submit_tiles.sh submits it, with its array:
#
#   sbatch --array=0-11 tiles.sh CONFIG.toml RUNS NSIDE [--set SECTION.KEY=VALUE ...]
#
# The configuration holds its hyperparameters (model.learn = []): tiles must share them.
#
#SBATCH --job-name=dustmap-tiles
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.log
## Edit: partition, account, GPU.
##SBATCH --partition=gpu
##SBATCH --account=project
##SBATCH --gpus=1

set -euo pipefail
# shellcheck source=requeue.sh
source "${SLURM_SUBMIT_DIR}/requeue.sh"

config=$1 runs=$2 nside=$3
shift 3
task=$SLURM_ARRAY_TASK_ID
memory=${DUSTMAP_MEMORY:-60GiB}
command=(dustmap run "$config" --output "$runs/$nside-$task" --resume
    --set "data.tile=$nside/$task"
    --threads "${SLURM_CPUS_PER_TASK:-1}" --memory "$memory" "$@")

plan "${command[@]}" --dry-run
run_or_requeue "${command[@]}"
