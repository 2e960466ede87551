"""dustmap merge: the maps of tiles as one map."""

import argparse
from pathlib import Path

from dustmap.cli._compute import compute_alone
from dustmap.cli._exit import DONE, BadInput, checking_input
from dustmap.cli._parser import Commands, add_compute, add_json, add_output, new
from dustmap.cli._reads import inputs_of
from dustmap.cli._tell import tell

SUFFIXES = {".zarr": "zarr", ".fits": "fits"}


def add(commands: Commands) -> None:
    command = new(
        commands,
        "merge",
        "join the maps of tiles (data.tile) into one",
        "merge tiles/1-* --output map.zarr",
        "merge tiles/1-0 tiles/1-4 --output part.fits --partial",
    )
    command.add_argument(
        "tiles", metavar="TILE", nargs="+", help="runs with data.tile, or their map.zarr"
    )
    add_output(command, "the merged map", "map.zarr")
    command.add_argument(
        "--format", choices=("zarr", "fits"), help="as --output ends by default, else zarr"
    )
    command.add_argument(
        "--partial", action="store_true", help="voxels that lie in no tile given are NaN"
    )
    add_compute(command, ("memory",), "how it is computed")
    add_json(command)


def execute(options: argparse.Namespace) -> int:
    from dustmap.cli._progress import progress
    from dustmap.runs import sky_of_tiles
    from dustmap.sky import check_output

    output = Path(options.output)
    with checking_input():
        form = _format(output, options.format)
        memory = compute_alone(options).memory_bytes
        check_output(output, options.overwrite, inputs_of(*options.tiles))
        sky = sky_of_tiles([Path(tile) for tile in options.tiles], options.partial)
    with checking_input(), progress() as shown:
        sky.write(output, form, options.overwrite, memory, shown)
    tell({"output": str(output), "format": form, **sky.counts()}, options.json)
    return DONE


def _format(output: Path, asked: str | None) -> str:
    """What is asked for, which the name must not deny."""
    named = SUFFIXES.get(output.suffix.lower())
    if asked is not None and named not in (None, asked):
        raise BadInput(f"--output {output}: --format {asked} is no {output.suffix}")
    return asked or named or "zarr"
