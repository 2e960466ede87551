"""dustmap plot: pictures of a map."""

import argparse
from pathlib import Path

from dustmap.cli._exit import DONE, checking_input
from dustmap.cli._parser import Commands, add_output, new
from dustmap.cli._tell import tell
from dustmap.config import parsecs


def add(commands: Commands) -> None:
    command = new(
        commands,
        "plot",
        "draw a slice through a map",
        "plot run1 --slice z=0 --output slice.png",
        "plot run1/map.fits --slice z=20pc --truth truth.zarr --output slice.pdf",
    )
    command.add_argument("map", metavar="RUN|MAP", help="a run, a map.zarr or a map.fits")
    command.add_argument("--slice", default="z=0", metavar="z=PC")
    command.add_argument("--truth", metavar="TRUTH.zarr", help="draw the true density beside it")
    add_output(command, ".png or .pdf")


def execute(options: argparse.Namespace) -> int:
    from dustmap.runs import regression_at
    from dustmap.sky import DustMap, plot_slice, save_figure

    with checking_input():
        regression = regression_at(Path(options.map))
        if regression is not None:
            regression.plot(options.slice, Path(options.output), options.overwrite)
            tell({"output": options.output}, as_json=False)
            return DONE
        axis, equals, height = options.slice.partition("=")
        if axis != "z" or not equals:
            raise ValueError(f"--slice {options.slice}: expected z=PC, such as z=0 or z=-20pc")
        density = DustMap.open(options.map)
        truth = DustMap.open(options.truth) if options.truth else None
        figure = plot_slice(density, parsecs(height), truth)
        save_figure(figure, options.output, options.overwrite)
    tell({"output": options.output}, as_json=False)
    return DONE
