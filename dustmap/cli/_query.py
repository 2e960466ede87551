"""dustmap query: the density at places, and the extinction to them."""

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustmap.cli._compute import computing, computing_on_map
from dustmap.cli._exit import DONE, BadInput, checking_input
from dustmap.cli._parser import OF_A_RUN, Commands, add_compute, add_json, new
from dustmap.cli._tell import tell
from dustmap.config import parsecs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dustmap.sky.maps import DustMap
    from dustmap.sky.stars import AbstractDistances

    Columns = dict[str, NDArray[np.float64]]

log = logging.getLogger(__name__)


def add(commands: Commands) -> None:
    command = new(
        commands,
        "query",
        "density at a place and extinction to it, mean and standard deviation",
        "query run1 --l 30 --b 5 --distance 150pc",
        "query map.zarr --l 30 --b 5 --distance 0.15kpc --json",
        "query map.fits --file coords.csv > answers.csv",
    )
    command.add_argument("map", metavar="MAP", help="a run, a map.zarr or a map.fits")
    command.add_argument("--l", type=float, metavar="DEG", dest="l", help="Galactic longitude")
    command.add_argument("--b", type=float, metavar="DEG", dest="b", help="Galactic latitude")
    command.add_argument("--distance", metavar="PC", help="from the Sun, such as 120 or 0.3kpc")
    command.add_argument(
        "--file", metavar="COORDS.csv", help="many places: l, b (or ra, dec) and distance_pc"
    )
    command.add_argument(
        "--schema", default="generic", metavar="NAME|CARD.toml", help="columns of --file [generic]"
    )
    add_compute(command, title=OF_A_RUN)
    add_json(command)


def execute(options: argparse.Namespace) -> int:
    place = (options.l, options.b, options.distance)
    missing = sum(value is None for value in place)
    if missing != (0 if options.file is None else len(place)):
        raise BadInput("query: expected either --l, --b and --distance, or --file")
    return _one(options) if options.file is None else _many(options)


def _one(options: argparse.Namespace) -> int:
    import numpy as np

    from dustmap.sky.stars import ExactDistances

    with checking_input():
        distance = parsecs(options.distance)
        if not abs(options.b) <= 90.0:
            raise ValueError(f"--b {options.b:g}: expected -90 to 90 degrees")
        if not distance > 0.0:
            raise ValueError(f"--distance {options.distance}: expected more than 0 pc")
        l, b, d = (np.array([value], np.float64) for value in (options.l, options.b, distance))
        found = _answers(options, l, b, ExactDistances(d))
        if np.isnan(found["density_mean"][0]):
            raise ValueError(
                f"l = {options.l:g}, b = {options.b:g}, distance = {distance:g} pc is outside "
                f"the box of {options.map}"
            )
    told = {name: _json(values)[0] for name, values in found.items()}
    tell(told if options.json else {name: float(v[0]) for name, v in found.items()}, options.json)
    return DONE


def _many(options: argparse.Namespace) -> int:
    import numpy as np

    from dustmap.runs import places_of_map

    with checking_input():
        places = places_of_map(Path(options.map), Path(options.file), options.schema)
        found = _answers(options, places.l, places.b, places.distances)
    outside = int(np.isnan(found["density_mean"]).sum())
    log.info("%d of %d places are outside the box", outside, len(places.l))
    if options.json:
        columns = {name: _json(values) for name, values in found.items()}
        tell({"rows": len(places.l), "rows_outside_the_box": outside, **columns}, True)
        return DONE
    table = places.table
    for name, values in found.items():
        table[name] = values
    table.write(sys.stdout, format="ascii.csv")
    return DONE


def _json(values: "NDArray[np.float64]") -> list[float | None]:
    """JSON has no NaN."""
    return [None if value != value else value for value in values.tolist()]


def _answers(
    options: argparse.Namespace,
    l: "NDArray[np.float64]",
    b: "NDArray[np.float64]",
    distances: "AbstractDistances",
) -> "Columns":
    """density_mean, extinction_mean and their std (N,), NaN outside: of a run's posterior, which
    knows what uncertain distances mean, or of a map at the median distance."""
    from dustmap.runs import open_star_map
    from dustmap.sky.maps import DustMap, quietly

    path = Path(options.map)
    if (path / "config.toml").is_file():
        return dict(open_star_map(path, computing(options, path)).at_stars(l, b, distances))
    compute = computing_on_map(options, path)
    # Four questions about the same places would count those outside four times.
    with quietly():
        return _of_map(DustMap.open(path, memory=compute.memory_bytes // 2), l, b, distances.median)


def _of_map(
    density: "DustMap",
    l: "NDArray[np.float64]",
    b: "NDArray[np.float64]",
    distance: "NDArray[np.float64]",
) -> "Columns":
    """What the file can answer: the std of extinctions needs samples."""
    import astropy.units as u
    import numpy as np
    from astropy.coordinates import SkyCoord

    from dustmap.sky.maps import Quantity

    place: tuple[Any, ...] = (l * u.deg, b * u.deg, distance * u.pc)
    sampled = density.n_samples > 1
    found = {"extinction_mean": density.query_gal(*place, integrated=True)}
    if sampled:
        found["extinction_std"] = density.query_gal(*place, mode="std", integrated=True)
    else:
        log.info("no extinction_std: the map has no samples, export it with --samples")
    found["density_mean"] = density.query_gal(*place)
    inside = density.contains(SkyCoord(*place, frame="galactic"))
    if np.isnan(found["density_mean"][inside]).any():
        raise ValueError("the map has no density at places inside its box: a part of it is missing")
    if sampled or Quantity.STD in density.available:
        found["density_std"] = density.query_gal(*place, mode="std")
    return found
