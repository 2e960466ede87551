#!/usr/bin/env python3
"""Slices, projections and skies of a map of the dust, in one command.

    scripts/sky_slices.py MAP FOLDER              a run, a map.zarr or a map.fits, into a folder
    scripts/sky_slices.py MAP FOLDER --truth T    with the truth, or another map, beside it

Needs an environment in which dustmap is installed; what it uses is the public interface.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from dustmap.sky import (
    Axis,
    DustMap,
    extinction_sky_figure,
    projection_figure,
    save_figure,
    shell_figure,
    slice_figure,
)

#: Slices unless others are asked for, as parts of the map's half-size: in the middle, above, below.
HEIGHTS = (-0.5, 0.0, 0.5)
#: Distances of skies, as parts of the radius of the largest sphere inside the map.
SHELLS = (1 / 3, 2 / 3, 1.0)


@dataclass(frozen=True)
class Picture:
    """A name without ending, and how to draw it."""

    name: str
    draw: Callable[[], Figure]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws everything; one line per file."""
    options = parser().parse_args(arguments)
    try:
        density = DustMap.open(options.map)
        truth = DustMap.open(options.truth) if options.truth else None
        for picture in pictures(density, truth, options.slices, options.distances):
            path = Path(options.folder) / f"{picture.name}.{options.format}"
            save_figure(picture.draw(), path, options.overwrite)
            print(path)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"sky_slices: error: {' '.join(str(error).split())}\n")
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(
        description="Slices, projections and skies of a map of the dust."
    )
    command.add_argument("map", help="a run, a map.zarr or a map.fits")
    command.add_argument("folder", help="where the pictures go")
    command.add_argument("--truth", help="another map to draw beside this one")
    command.add_argument("--slices", nargs="*", type=float, metavar="Z", help="heights in pc")
    command.add_argument("--distances", nargs="*", type=float, metavar="D", help="of skies, in pc")
    command.add_argument("--format", choices=("png", "pdf"), default="png")
    command.add_argument("--overwrite", action="store_true", help="replace what is there")
    return command


def pictures(
    density: DustMap,
    truth: DustMap | None,
    heights: Sequence[float] | None,
    distances: Sequence[float] | None,
) -> Iterator[Picture]:
    """In the order in which they are drawn."""
    low, high = density.grid.lower, density.grid.upper
    middle = [0.5 * (a + b) for a, b in zip(low, high, strict=True)]
    if heights is None:
        heights = [middle[2] + part * 0.5 * (high[2] - low[2]) for part in HEIGHTS]
    for z in heights:
        yield Picture(f"slice_z{z:+.0f}", partial(slice_figure, density, Axis.Z, z, truth))
    for axis in (Axis.X, Axis.Y):
        # Through the Sun, if it is inside.
        level = min(max(0.0, low[axis.value]), high[axis.value])
        name = f"slice_{axis.name.lower()}{level:+.0f}"
        yield Picture(name, partial(slice_figure, density, axis, level, truth))
    yield Picture("top_down", partial(projection_figure, density, Axis.Z, truth))
    yield Picture("side_on", partial(projection_figure, density, Axis.Y, truth))
    if distances is None:
        inside = min(min(-a, b) for a, b in zip(low, high, strict=True))
        distances = [part * inside for part in SHELLS] if inside > 0 else []
    for d in distances:
        yield Picture(f"shell_{d:.0f}pc", partial(shell_figure, density, d, truth=truth))
    for d in distances[-1:]:
        draw = partial(extinction_sky_figure, density, d, truth=truth)
        yield Picture(f"extinction_{d:.0f}pc", draw)


if __name__ == "__main__":
    sys.exit(main())
