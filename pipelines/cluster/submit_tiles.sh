#!/bin/bash
# All tiles of a sky, then their merged map:
#
#   bash submit_tiles.sh CONFIG.toml RUNS NSIDE [--set SECTION.KEY=VALUE ...]
#
# NSIDE 1, 2 or 4: 12, 48 or 192 jobs. The map is RUNS/map.zarr. With TILES=3,7-9 in the environment
# only these tiles are fitted: those that failed, or those that a box beside the Sun has.

set -euo pipefail

config=$1 runs=$2 nside=$3
shift 3
last=$((12 * nside * nside - 1))
tiles=$(sbatch --parsable --array="${TILES:-0-$last}" tiles.sh "$config" "$runs" "$nside" "$@")
# Whatever became of them: a task whose checks failed (exit code 3) has left its map, one beyond the
# box (2) is not needed, and of any other the merge says that it is missing.
sbatch --dependency="afterany:${tiles%%;*}" merge.sh "$runs" "$nside" "$runs/map.zarr"
