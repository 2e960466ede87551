#!/bin/bash
# All tiles NSIDE-* of RUNS as one map:   sbatch merge.sh RUNS NSIDE MAP.zarr
#
#SBATCH --job-name=dustmap-merge
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=16G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
## Edit: partition, account.
##SBATCH --partition=cpu
##SBATCH --account=project

set -euo pipefail

runs=$1 nside=$2 map=$3
# A tile that is missing is refused, and named. --overwrite: of what an earlier try has left.
dustmap merge "$runs/$nside"-[0-9]* --output "$map" --overwrite \
    --memory "${DUSTMAP_MEMORY:-12GiB}"
