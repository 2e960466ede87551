#!/bin/bash
# One run on one node:   sbatch one_node.sh CONFIG.toml RUN [--set SECTION.KEY=VALUE ...]
#
#SBATCH --job-name=dustmap
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
## Edit: partition, account, GPU.
##SBATCH --partition=gpu
##SBATCH --account=project
##SBATCH --gpus=1

set -euo pipefail
# Slurm runs a copy of this file: what is beside it is where sbatch was called.
# shellcheck source=requeue.sh
source "${SLURM_SUBMIT_DIR}/requeue.sh"

config=$1 run=$2
shift 2
# Ranks share processors and memory.
ranks=1 before=""
for argument in "$@"; do
    [[ $before == --ranks ]] && ranks=$argument
    [[ $argument == --ranks=* ]] && ranks=${argument#*=}
    before=$argument
done
threads=$((${SLURM_CPUS_PER_TASK:-1} / ranks))
memory=${DUSTMAP_MEMORY:-$((60 / ranks))GiB} # of each rank
command=(dustmap run "$config" --output "$run" --resume
    --threads "$((threads > 0 ? threads : 1))" --memory "$memory" "$@")

# What it would do, in bytes and seconds; ends the job here if the memory is too small.
plan "${command[@]}" --dry-run
run_or_requeue "${command[@]}"
