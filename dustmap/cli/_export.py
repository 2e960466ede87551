"""dustmap export: the map of a run on any grid."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dustmap.cli._exit import DONE, BadInput, checking_input
from dustmap.cli._parser import Commands, add_output, new
from dustmap.cli._tell import tell
from dustmap.config import parsecs

if TYPE_CHECKING:
    from dustmap.runs import RegressionResult


def add(commands: Commands) -> None:
    command = new(
        commands,
        "export",
        "write a run's map on any grid",
        "export run1 --format fits --output map.fits",
        "export run1 --format zarr --output part.zarr --box -100 100 -100 100 -50 50 --step 5pc",
    )
    command.add_argument("run", metavar="RUN")
    command.add_argument("--format", choices=("zarr", "fits"), required=True)
    add_output(command, "the file")
    command.add_argument(
        "--box", nargs=6, metavar=("X0", "X1", "Y0", "Y1", "Z0", "Z1"), help="the run's by default"
    )
    command.add_argument("--step", metavar="PC", help="between voxels; the run's by default")


def execute(options: argparse.Namespace) -> int:
    from dustmap.runs import open_star_map, regression_at
    from dustmap.sky import refuse_existing

    output = Path(options.output)
    with checking_input():
        refuse_existing(output, options.overwrite)
        regression = regression_at(Path(options.run))
    if regression is not None:
        return _export_regression(regression, options)
    with checking_input():
        finished = open_star_map(Path(options.run))
        box = None if options.box is None else [parsecs(face) for face in options.box]
        grid = finished.grid(box, None if options.step is None else parsecs(options.step))
    tell(finished.export(options.format, output, options.overwrite, grid), as_json=False)
    return DONE


def _export_regression(finished: "RegressionResult", options: argparse.Namespace) -> int:
    if options.box is not None or options.step is not None:
        raise BadInput("--box and --step are for maps of the dust; [grid] says where this one is")
    tell(finished.export(options.format, Path(options.output), options.overwrite), as_json=False)
    return DONE
