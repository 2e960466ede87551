#!/bin/bash
# Every configuration with every seed 0 .. SEEDS - 1, a task of the array each, in RUNS/NAME-SEED:
#
#   sbatch --array=0-7 seeds.sh SEEDS RUNS CONFIG.toml ...      (SEEDS x configurations - 1)
#
#SBATCH --job-name=dustmap-seeds
#SBATCH --array=0-7
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=06:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.log
## Edit: partition, account.
##SBATCH --partition=cpu
##SBATCH --account=project

set -euo pipefail
# shellcheck source=requeue.sh
source "${SLURM_SUBMIT_DIR}/requeue.sh"

seeds=$1 runs=$2
shift 2
configs=("$@")
task=$SLURM_ARRAY_TASK_ID
if ((task >= seeds * ${#configs[@]})); then
    echo "task $task: ${#configs[@]} configurations with $seeds seeds are fewer tasks" >&2
    exit 2
fi
if (($(basename -a -s .toml "${configs[@]}" | sort -u | wc -l) < ${#configs[@]})); then
    echo "configurations of one name would share their runs in $runs: rename all but one" >&2
    exit 2
fi
config=${configs[task / seeds]} seed=$((task % seeds))
run="$runs/$(basename "$config" .toml)-$seed"
memory=${DUSTMAP_MEMORY:-30GiB}
command=(dustmap run "$config" --output "$run" --resume --set "fit.seed=$seed"
    --threads "${SLURM_CPUS_PER_TASK:-1}" --memory "$memory")

plan "${command[@]}" --dry-run
run_or_requeue "${command[@]}"
