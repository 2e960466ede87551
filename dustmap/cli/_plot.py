"""dustmap plot: pictures of a map, and of what a run says of stars it has not seen; dustmap view:
one page of a map, which any browser opens without a network.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dustmap import config as configuration
from dustmap import runs, sky, tables
from dustmap.cli import _options
from dustmap.cli._console import print_result
from dustmap.config import parsecs
from dustmap.errors import UserError
from dustmap.sky import clouds, figures, maps

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray


#: Options that say more of a picture -> the options of the pictures that they belong to.
BELONGS = {
    "integrated": ("sky",),
    "zoom": ("sky",),
    "beam": ("los",),
    "truth": ("slice", "top_down", "side_on", "sky", "los"),
    "clouds": ("slice", "slices", "top_down", "side_on", "sky"),
}
#: Slices in one picture, at most.
_MOST_SLICES = 36

_MEGABYTE = 1e6
#: Columns with names of points, whatever their case.
_NAME_COLUMNS = ("name", "id")


def add_plot(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "plot",
        "draw a map: slices, projections, skies, lines of sight; a run's held-out stars",
        "plot run1 --slice z=0 --output slice.png",
        "plot map.fits --slice x=-20pc --truth truth.zarr --output slice.pdf",
        "plot map.zarr --top-down --output above.pdf",
        "plot map.zarr --sky 300pc --integrated --output sky.png",
        "plot map.zarr --sky 300 --zoom 160 -15 20 --output taurus.png",
        "plot map.zarr --slices z=-200:200:50 --output slices.pdf",
        "plot map.zarr --sky 100 200 300 --output skies.pdf",
        "plot run1 --los 160 -15 --beam 2 --output profile.png",
        "plot run1 --los Taurus --output taurus.pdf",
        "plot run1 --top-down --clouds clouds.ecsv --output clouds.png",
        "plot run1 --calibration --output calibration.png",
    )
    _options.add_map(command, "RUN|MAP")
    picture = command.add_mutually_exclusive_group()
    command.option("--slice AXIS=PC", "a plane, such as z=0 [the default]", picture)
    command.option("--top-down", "the extinction along z", picture)
    command.option("--side-on", "the extinction along y", picture)
    command.option("--slices AXIS=FROM:TO:STEP", "several planes, such as z=-200:200:50", picture)
    command.option("--sky PC...", "the whole sky at a distance, or at several", picture)
    picture.add_argument(
        "--los",
        nargs="+",
        metavar=("L B|CLOUD", ""),
        help="a line of sight, in degrees, or to a cloud of Zucker et al. (2020) such as Taurus",
    )
    for name, meaning in _OF_RUNS.items():
        command.option(f"--{name}", f"of a run: {meaning}", picture)
    command.option(
        "--integrated", "with --sky: the extinction up to the distance, and its uncertainty"
    )
    command.option("--zoom L B RADIUS", "with --sky: a window, in degrees", type=float)
    command.option("--beam DEG", "with --los: radius for stars of a run [3]", type=float)
    command.option("--truth TRUTH.zarr", "draw the true density beside it")
    command.option("--clouds FILE", "outline the clouds of this table")
    _options.add_output(command, ".png or .pdf")
    _options.add_compute_and_json(command, title=_options.COMPUTE_TITLE)


#: What is drawn of a run's held-out stars.
_OF_RUNS = {
    "extinctions": "measured and predicted extinctions of held-out stars",
    "residuals": "residuals of held-out stars on the sky",
    "calibration": "whether predictions of held-out stars are as good as they promise",
}


def execute_plot(options: argparse.Namespace) -> int:
    figures.check_picture(options.output)
    inputs = options.truth, options.clouds
    output = _options.output_of(options, *inputs, map_or_run=options.map)
    chosen = _check(options)
    regression, history = _regression(options), _options.history(options)
    if regression is not None:
        if chosen != "slice":
            raise UserError(f"--{chosen.replace('_', '-')} is for maps of dust, not of a fit")
        regression.plot(options.slice or "", output, options.overwrite, history)
    else:
        figure = _DRAWN_FOR[chosen](options)
        figures.save_figure(figure, output, options.overwrite, history)
    return print_result({"output": options.output}, options.json)


def _regression(options: argparse.Namespace) -> "runs.RegressionResult | None":
    """Open a run with data.kind = "regression"; None for other runs and for maps."""
    path = Path(options.map)
    if not _options.is_run(path):
        return None
    return runs.regression_at(path, _options.computing(options, path))


def _check(options: argparse.Namespace) -> str:
    """The picture that is asked for; options that do not belong to it are refused."""
    given = {
        name for name, value in vars(options).items() if value is not None and value is not False
    }
    asked = [name for name in _DRAWN_FOR if name in given]
    chosen = asked[0] if asked else "slice"
    for name, pictures in BELONGS.items():
        if name in given and chosen not in pictures:
            known = ", ".join(f"--{picture.replace('_', '-')}" for picture in pictures)
            raise UserError(f"plot: --{name} goes with {known}")
    return chosen


def _slice(options: argparse.Namespace) -> "Figure":
    plane = options.slice or "z=0"
    name, equals, level = plane.partition("=")
    if name.upper() not in figures.Axis.__members__ or not equals:
        raise UserError(f"--slice {plane}: expected x, y or z=PC, such as z=0 or x=-20pc")
    axis = figures.Axis[name.upper()]
    return figures.slice_figure(
        _map(options), axis, parsecs(level), _truth(options), _clouds(options)
    )


def _slices(options: argparse.Namespace) -> "Figure":
    name, _, levels = options.slices.partition("=")
    bounds = levels.split(":")
    if name.upper() not in figures.Axis.__members__ or len(bounds) != 3:
        raise UserError(
            f"--slices {options.slices}: expected x, y or z=FROM:TO:STEP, such as z=-200:200:50"
        )
    start, end, step = map(parsecs, bounds)
    count = 1 + int((end - start) / step + 1e-9) if step > 0 and end >= start else 0
    if not 1 <= count <= _MOST_SLICES:
        raise UserError(
            f"--slices {options.slices}: expected FROM <= TO and a STEP that makes 1 to "
            f"{_MOST_SLICES} slices, got {max(0, count)}"
        )
    planes = [start + k * step for k in range(count)]
    return figures.slices_figure(
        _map(options), figures.Axis[name.upper()], planes, _clouds(options)
    )


def _projection(options: argparse.Namespace, axis: str) -> "Figure":
    return figures.projection_figure(
        _map(options), figures.Axis[axis], _truth(options), _clouds(options)
    )


def _sky(options: argparse.Namespace) -> "Figure":
    distances, path = [parsecs(written) for written in options.sky], Path(options.map)
    pixels = None if options.zoom is None else figures.Pixels.around(*options.zoom)
    if len(distances) > 1:
        if options.truth is not None:
            raise UserError("--truth: expected one distance of --sky to draw it beside")
        several = _map(options), distances, pixels, options.integrated, _clouds(options)
        return figures.skies_figure(*several)
    distance = distances[0]
    what, clouds = (_map(options), distance, pixels, _truth(options)), _clouds(options)
    if options.integrated:
        return figures.extinction_sky_figure(*what, clouds)
    if not _options.is_run(path):
        return figures.shell_figure(*what, clouds=clouds)
    finished = _options.star_map(options)
    return figures.shell_figure(*what, finished.field(), finished.device, clouds)


def _los(options: argparse.Namespace) -> "Figure":
    """Draw a line of sight of a run's posterior with its stars, or of a map."""
    l, b, target = _towards(options.los)
    path, truth = Path(options.map), _truth(options)
    if not _options.is_run(path):
        if options.beam is not None:
            raise UserError(f"--beam needs the stars of a run, and {path} is a map")
        profile = figures.profile_of_map(_map(options), l, b, truth)
        return figures.line_of_sight_figure(profile, target=target)
    from dustmap.runs.stars import of_no_group

    finished = _options.star_map(options)
    step = 0.25 * finished.run.config.grid.finest
    profile = figures.profile_of_field(finished.field(), step, l, b, truth, finished.device)
    beam = figures.BEAM if options.beam is None else options.beam
    own = of_no_group(finished.run.stars, finished.fit)
    return figures.line_of_sight_figure(profile, own, beam, target)


def _towards(words: Sequence[str]) -> "tuple[float, float, figures.Target | None]":
    """Return l, b in degrees, and the cloud if it is one that is named."""
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        name = " ".join(words)
        l, b, distance = clouds.NamedPlaces.read().place(name)
        return l, b, figures.Target(name, distance)
    if len(numbers) != 2:
        raise UserError(
            f"--los {' '.join(words)}: expected L and B in degrees, or the name of a cloud"
        )
    return numbers[0], numbers[1], None


def _of_held_out(options: argparse.Namespace, name: str) -> "Figure":
    return figures.held_out_figure(name, _options.star_map(options).held_out())


#: By the option that asks for it.
_DRAWN_FOR: dict[str, Callable[[argparse.Namespace], "Figure"]] = {
    "slice": _slice,
    "slices": _slices,
    "top_down": partial(_projection, axis="Z"),
    "side_on": partial(_projection, axis="Y"),
    "sky": _sky,
    "los": _los,
    **{name: partial(_of_held_out, name=name) for name in _OF_RUNS},
}


def _map(options: argparse.Namespace) -> "maps.DustMap":
    """The map, with all of its levels."""
    path = Path(options.map)
    if not _options.is_run(path):
        return _options.map_at(options, path)
    # The threads of the run, and its memory or another.
    compute = configuration.load(path / "config.toml", _options.computing(options, path)).compute
    return maps.DustMap.open(path, memory=compute.memory_bytes // 2)


def _truth(options: argparse.Namespace) -> "maps.DustMap | None":
    return maps.DustMap.open(options.truth) if options.truth else None


def _clouds(options: argparse.Namespace) -> "figures.CloudMarks | None":
    return figures.CloudMarks.read(Path(options.clouds)) if options.clouds else None


def add_view(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "view",
        "make a page of a map that any browser opens: to turn, to cut and to ask",
        "view run1 --output view.html",
        "view map.fits --points clouds.ecsv --title 'Local dust' --output view.html",
        about="One HTML file without a network: the density in three dimensions, its uncertainty,\n"
        "posterior samples, slices, and the numbers at any place. Cubes that are too large for it\n"
        "are averaged over blocks of voxels, which the command and the page say.",
    )
    _options.add_map(command, "RUN|MAP")
    command.option("--points FILE", "places to mark, with names: l, b and distance_pc")
    _options.add_schema(command, "columns of --points [generic]")
    command.option("--samples N", "posterior samples, at most [8]", type=int, default=8)
    command.option("--title WORDS", "of the page [the name of the map]")
    command.option("--max-size MB", "of the file, at most [15]", type=float, default=15.0)
    _options.add_output(command, ".html")
    _options.add_json(command)


def execute_view(options: argparse.Namespace) -> int:
    from dustmap.sky.view._page import check_page, faces_of, page_of

    check_page(options.output)
    path = Path(options.map)
    output = _options.output_of(options, options.points, map_or_run=path, schema=options.schema)
    if not 0 < options.max_size < math.inf:
        raise UserError(f"--max-size {options.max_size:g}: expected a number of MB above 0")
    density = maps.DustMap.open(path)
    names, places = _points(options)
    title = options.title or f"Dust density of {path.resolve().name}"
    words = {"title": title, "history": _options.history(options)}
    most_bytes = int(options.max_size * _MEGABYTE)
    page = page_of(density, names, places, options.samples, most_bytes, words)
    page.save(output, options.overwrite)
    low, high = faces_of(density.grid)
    outside = int(((places < low) | (places > high)).any(-1).sum())
    made = {
        "output": options.output,
        "bytes": page.size,
        "voxels": list(page.volumes[0].shape),
        "samples": sum(volume.name.startswith("sample") for volume in page.volumes),
        "points": len(names),
        "points_outside_the_box": outside,
        "coarsened": page.coarsened or "no",
    }
    return print_result(made, options.json)


def _points(options: argparse.Namespace) -> "tuple[list[str], NDArray[np.float64]]":
    """Read names and places (N, 3) in pc; points without a column of names have none."""
    import numpy as np

    if options.points is None:
        if options.column or options.schema != "generic":
            raise UserError("view: --column and --schema go with --points")
        return [], np.empty((0, 3))
    places = runs.places_of_map(Path(options.map), Path(options.points), _options.card_of(options))
    columns = {name.lower(): name for name in places.table.colnames[::-1]}
    named = next((columns[name] for name in _NAME_COLUMNS if name in columns), None)
    rows = range(len(places)) if places.rows is None else places.rows
    words = ("",) * len(places.table) if named is None else tables.text_column(places.table, named)
    return [words[row] for row in rows], sky.cartesian(places.l, places.b, places.distances.median)
