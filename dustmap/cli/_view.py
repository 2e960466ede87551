"""dustmap view: one page of a map, which any browser opens without a network."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dustmap.cli import _options
from dustmap.cli._exit import DONE
from dustmap.cli._printing import print_result
from dustmap.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MEGABYTE = 1e6
#: Columns with names of points, whatever their case.
_NAME_COLUMNS = ("name", "id")


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
    command.add_argument("map", metavar="RUN|MAP", help="a run, a map.zarr or a map.fits")
    command.add_argument(
        "--points", metavar="FILE", help="places to mark, with names: l, b and distance_pc"
    )
    command.add_argument(
        "--schema",
        default="generic",
        metavar="NAME|CARD.toml",
        help="columns of --points [generic]",
    )
    _options.add_columns(command)
    command.add_argument(
        "--samples", type=int, default=8, metavar="N", help="posterior samples, at most [8]"
    )
    command.add_argument("--title", metavar="WORDS", help="of the page [the name of the map]")
    command.add_argument(
        "--max-size", type=float, default=15.0, metavar="MB", help="of the file, at most [15]"
    )
    _options.add_output(command, ".html")
    _options.add_json(command)


def execute_view(options: argparse.Namespace) -> int:
    from dustmap.sky import check_output
    from dustmap.sky.maps import DustMap
    from dustmap.sky.view._page import check_page, faces_of, page_of

    check_page(options.output)
    path, output = Path(options.map), Path(options.output)
    inputs = _options.inputs_of(options.points, map_or_run=path, schema=options.schema)
    check_output(output, options.overwrite, inputs)
    if not options.max_size > 0:
        raise UserError(f"--max-size {options.max_size:g}: expected more than 0 MB")
    density = DustMap.open(path)
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
    print_result(made, options.json)
    return DONE


def _points(options: argparse.Namespace) -> "tuple[list[str], NDArray[np.float64]]":
    """Read names and places (N, 3) in pc; points without a column of names have none."""
    import numpy as np

    if options.points is None:
        if options.column or options.schema != "generic":
            raise UserError("view: --column and --schema go with --points")
        return [], np.empty((0, 3))
    from dustmap.runs import places_of_map
    from dustmap.sky import card_named, cartesian
    from dustmap.tables import text_column

    card = card_named(options.schema, _options.columns_of(options))
    places = places_of_map(Path(options.map), Path(options.points), card)
    columns = {name.lower(): name for name in places.table.colnames[::-1]}
    named = next((columns[name] for name in _NAME_COLUMNS if name in columns), None)
    names = ("",) * len(places) if named is None else text_column(places.table, named)
    return list(names), cartesian(places.l, places.b, places.distances.median)
