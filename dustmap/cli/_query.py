"""dustmap query and predict: what a map says of places and of catalogs."""

import argparse
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dustmap import runs, sky, tables
from dustmap.cli import _options
from dustmap.cli._console import DONE, print_result, progress, write
from dustmap.config import parsecs
from dustmap.errors import UserError
from dustmap.sky import clouds, maps, stars, systems

if TYPE_CHECKING:
    import numpy as np
    from astropy.table import Table
    from numpy.typing import NDArray

    Columns: TypeAlias = dict[str, NDArray[np.float64]]

log = logging.getLogger(__name__)

#: Roles of columns that say where a row is.
_COORDINATES = ("l", "b", "ra", "dec", "x", "y", "z")

#: Whether what columns are named after is integrated along the line of sight.
_IS_INTEGRATED = {"extinction": True, "density": False}
#: What JSON says of the rows of a file.
_COUNTS = ("rows", "rows_outside_the_box", "rows_without_a_place")
#: Percentiles of a profile.
PROFILE_LEVELS = (16.0, 84.0)
#: Rows of a profile.
MOST = 100_000
_ABOUT = """\
Names are those of the 163 lines of sight through clouds of Zucker et al. (2020) that ship; of
several with one name the middle one counts. Their distances hold where no other is given."""


def add_query(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "query",
        "density at a place and extinction to it, mean and standard deviation",
        "query run1 --l 30 --b 5 --distance 150pc",
        "query map.zarr --ra 280 --dec -10 --distance 0.15kpc --percentiles 5 50 95 --json",
        "query run1 --l 30 --b 5 --profile > profile.csv",
        "query map.fits --file coords.csv > answers.csv",
        "query run1 --name Taurus --system A_V",
        about=_ABOUT,
    )
    _options.add_map(command)
    command.option("--l DEG", "Galactic longitude", type=float)
    command.option("--b DEG", "Galactic latitude", type=float)
    command.option("--ra DEG", "or right ascension (ICRS)", type=float)
    command.option("--dec DEG", "and declination", type=float)
    command.option("--name CLOUD", "or a cloud, such as Taurus")
    command.option("--distance PC", "from the Sun, such as 120 or 0.3kpc")
    command.option(
        "--profile", "a row for each distance up to the face of the box, with percentiles 16 and 84"
    )
    command.option("--step PC", "between its distances [the finest voxel]")
    command.option(
        "--file COORDS.csv",
        "many places: l, b (or ra, dec) and distance_pc; or name, the names of clouds",
    )
    _options.add_schema(command, "columns of --file [generic]")
    command.option("--percentiles P...", "these, too, such as 5 50 95", type=float)
    _options.add_system(command, "of the answers, such as A_V [that of the map]")
    _options.add_compute_and_json(command, title=_options.COMPUTE_TITLE)


def execute_query(options: argparse.Namespace) -> int:
    _refuse_half_a_place(options)
    if options.file is not None:
        return _many(options)
    return _profile(options) if options.profile else _one(options)


def _refuse_half_a_place(options: argparse.Namespace) -> None:
    values = (options.l, options.b, options.ra, options.dec, options.name)
    present = [value is not None for value in values]
    named = present == [False] * 4 + [True]
    direction = present[:4] in ([True, True, False, False], [False, False, True, True])
    ways = (options.distance is not None) + options.profile
    many = options.file is not None
    one = (direction and not present[4] and ways == 1) or (named and ways <= 1)
    if (any(present) or ways) if many else not one:
        raise UserError(
            "query: expected either --l, --b and --distance, or --file; --ra and --dec may stand "
            "for --l and --b, --name for all three, and --profile for --distance"
        )
    if options.step is not None and not options.profile:
        raise UserError("query: --step goes with --profile")
    if not all(0.0 < p < 100.0 for p in options.percentiles or ()):
        raise UserError("query: --percentiles: expected percents between 0 and 100")


def _one(options: argparse.Namespace) -> int:
    import numpy as np

    l, b, distance = _direction(options)
    if options.distance is not None:
        distance = _positive(options.distance, "--distance")
    source, system = _opened(options)
    lon, lat, far = (np.array([value], np.float64) for value in (l, b, distance))
    answers = _answers(source, system, lon, lat, far, options.percentiles or ())
    if np.isnan(answers["density_mean"][0]):
        raise UserError(
            f"l = {l:g}, b = {b:g}, distance = {distance:g} pc is outside the box of "
            f"{options.map}, or in a part that the map does not have"
        )
    asked = {} if options.name is None else {"l": l, "b": b, "distance_pc": distance}
    if options.json:
        first = {name: values[0] for name, values in _json(answers).items()}
        return print_result(asked | first | sky.labels(system), True)
    lines = {
        name: f"{values[0]:.6g} {sky.unit_of(name)}".rstrip() for name, values in answers.items()
    }
    return print_result(asked | lines | {"extinction_system": system.name}, False)


def _many(options: argparse.Namespace) -> int:
    import numpy as np

    from dustmap.sky.maps._quantities import COVERAGE

    card = _options.card_of(options)
    named = _names_of_file(Path(options.file), card)
    places = named or runs.places_of_map(Path(options.map), Path(options.file), card)
    source, system = _opened(options)
    levels = options.percentiles or ()
    counted = _COUNTS if options.json else ()
    tables.refuse_taken(places.table, (*counted, *_answered(levels), COVERAGE, *sky.labels(system)))
    answers = _answers(source, system, places.l, places.b, places.distances, levels)
    outside = int(np.isnan(answers["density_mean"]).sum())
    if outside:
        words = "%d of %d places are outside the box, or what the map has: no answers"
        log.info(words, outside, len(places))
    counts = dict(zip(_COUNTS, (len(places.table), outside, places.missing), strict=True))
    filled = places.filled(answers)
    return _print_table(places.table, filled, system, counts if options.json else None)


def _answered(levels: Sequence[float]) -> list[str]:
    """Name the answers that there may be, with these percentiles."""
    kinds = ("mean", "std", *(f"p{level:g}" for level in levels))
    return [f"{quantity}_{kind}" for quantity in _IS_INTEGRATED for kind in kinds]


def _names_of_file(path: Path, card: "sky.SchemaCard") -> "sky.Places | None":
    """Read a table with names of clouds and no coordinates; None for any other table.

    Its distances, where it has them, count before those of the clouds.
    """
    import numpy as np

    held = {column.name.lower(): column.name for column in tables.open_table(path).columns}
    roles = [card.columns[role] for role in _COORDINATES if role in card.columns]
    known = {alias.ref.name.lower() for role in roles for alias in role.aliases}
    if "name" not in held or known & set(held):
        return None
    table, named = tables.read_tables(path), clouds.NamedPlaces.read()
    places = [named.place(name) for name in tables.text_column(table, held["name"])]
    l, b, distance = np.array(places).reshape(-1, 3).T
    column = card.columns.get("distance")  # of a card of parallaxes there is none
    own = [alias for alias in column.aliases if alias.ref.name.lower() in held] if column else []
    if own:
        name, unit = held[own[0].ref.name.lower()], own[0].unit
        given = tables.in_unit(table, name, tables.numbers_or_nan(table, name), unit.to_string())
        given = given * unit.to("pc")
        distance = np.where(np.isnan(given), distance, given)
        if not (distance > 0.0).all():
            raise UserError(f"{path}: {name}: expected more than 0 pc")
    columns = {"l": l, "b": b, "distance_pc": distance}
    table.update({name: values for name, values in columns.items() if name not in held})
    return sky.Places(table, l, b, stars.ExactDistances(distance), False)


def _profile(options: argparse.Namespace) -> int:
    """Answer at every step of distance in the box."""
    import numpy as np
    from astropy.table import Table

    l, b, _ = _direction(options)
    source, system = _opened(options)
    step = None if options.step is None else _positive(options.step, "--step")
    distance = _distances(source, l, b, step)
    direction = np.full_like(distance, l), np.full_like(distance, b)
    levels = sorted({*PROFILE_LEVELS, *(options.percentiles or ())})
    answers = _answers(source, system, *direction, distance, levels)
    table = Table({"distance_pc": distance})
    counts = {"rows": len(table)} if options.json else None
    return _print_table(table, answers, system, counts)


def _distances(
    source: "runs.StarMap | maps.DustMap", l: float, b: float, step: float | None
) -> "NDArray[np.float64]":
    """Multiples of a step, by default the finest spacing, as far as they are in the box."""
    import numpy as np

    if isinstance(source, maps.DustMap):
        grid, finest = source.grid, source.finest_spacing
    else:
        grid = source.run.grid
        finest = min(min(level.spacing) for level in (grid, *source.finer))
    step = finest if step is None else step
    far = float(np.linalg.norm(np.maximum(np.abs(grid.lower), np.abs(grid.upper))))
    if far > MOST * step:
        raise UserError(f"--step {step:g}: expected at least {far / MOST:g} pc in this box")
    distance = step * np.arange(1.0, far // step + 1.0)
    ahead = sky.cartesian(l, b, 1.0)
    inside: NDArray[np.float64] = distance[maps.within_box(grid, distance[:, None] * ahead)]
    if len(inside) == 0:
        raise UserError(
            f"l = {l:g}, b = {b:g}: none of the places every {step:g} pc is inside the box"
        )
    return inside


def _direction(options: argparse.Namespace) -> tuple[float, float, float]:
    """Galactic l, b in degrees, and of a name the distance in pc, else NaN."""
    if options.name is not None:
        return clouds.NamedPlaces.read().place(options.name)
    name = "b" if options.ra is None else "dec"
    latitude = getattr(options, name)
    if not abs(latitude) <= 90.0:
        raise UserError(f"--{name} {latitude:g}: expected -90 to 90 degrees")
    name = "l" if options.ra is None else "ra"
    if not math.isfinite(getattr(options, name)):
        raise UserError(f"--{name} {getattr(options, name):g}: expected a number of degrees")
    if options.ra is None:
        return options.l, options.b, math.nan
    import numpy as np

    l, b = sky.galactic_from_icrs(np.array([options.ra]), np.array([options.dec]))
    return float(l[0]), float(b[0]), math.nan


def _positive(written: str, option: str) -> float:
    length = parsecs(written)
    if not length > 0.0:
        raise UserError(f"{option} {written}: expected more than 0 pc")
    return length


def _print_table(
    table: "Table",
    answers: "Columns",
    system: "systems.ExtinctionSystem",
    counts: Mapping[str, int] | None,
) -> int:
    """The rows with their answers: CSV, or JSON with these counts; return as `print_result`."""
    if counts is not None:
        own = {name: table[name] for name in table.colnames}
        return print_result({**_json(own), **counts, **_json(answers), **sky.labels(system)}, True)
    sky.add_answers(table, answers, system, labelled=True)
    write(tables.csv_text(table))
    return DONE


def _json(columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    """JSON has no numbers that are not finite."""
    return {name: _plain(values) for name, values in columns.items()}


def _plain(value: Any) -> Any:
    """A value, or those of a column, as JSON has them."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, complex):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _opened(
    options: argparse.Namespace,
) -> "tuple[runs.StarMap | maps.DustMap, systems.ExtinctionSystem]":
    """A run's posterior, which knows what uncertain distances mean, or a map; and the extinction
    system of its answers."""
    wanted = systems.system_named(options.system) if options.system else None
    path = Path(options.map)
    source = _options.star_map(options) if _options.is_run(path) else _options.map_at(options, path)
    return source, wanted or source.system


def _answers(
    source: "runs.StarMap | maps.DustMap",
    system: "systems.ExtinctionSystem",
    l: "NDArray[np.float64]",
    b: "NDArray[np.float64]",
    distances: "stars.AbstractDistances | NDArray[np.float64]",
    levels: Sequence[float],
) -> "Columns":
    """density_mean, extinction_mean, their std and percentiles in a system, coverage (N,), NaN
    outside; of a map at the median distance. distances: in pc where they are exact."""
    import numpy as np

    from dustmap.sky.maps._quantities import COVERAGE

    factor = systems.conversion(source.system, system)
    if not isinstance(source, maps.DustMap):
        far = stars.ExactDistances(distances) if isinstance(distances, np.ndarray) else distances
        with progress() as shown:
            answers = dict(source.at_stars(l, b, far, shown))
        if levels:
            extinction, density = source.percentiles(l, b, far, [p / 100 for p in levels])
            answers |= _named("extinction", levels, extinction) | _named("density", levels, density)
        answers[COVERAGE] = source.coverage(l, b, far)
    else:
        if not (isinstance(distances, np.ndarray) or distances.exact):
            log.warning(
                "answers are at median distances, without their errors, which only runs take into "
                "account"
            )
        median = distances if isinstance(distances, np.ndarray) else distances.median
        # Four questions about the same places would count those outside four times.
        with maps.muted_reports():
            answers = dict(_of_map(source, l, b, median, levels))
    _report_lacking(answers)
    return {name: v if name == COVERAGE else factor * v for name, v in answers.items()}


def _report_lacking(answers: "Columns") -> None:
    """Count the places in the box that have some answers and not others."""
    import numpy as np

    inside = np.isfinite(answers["density_mean"])
    lacking = {name: int((inside & ~np.isfinite(v)).sum()) for name, v in answers.items()}
    if names := [name for name, count in lacking.items() if count]:
        log.warning(
            "%d of %d places in the box have no %s: their rays from the Sun leave the box or what "
            "the map has",
            max(lacking.values()),
            int(inside.sum()),
            ", ".join(names),
        )


def _named(quantity: str, levels: Sequence[float], values: "NDArray[np.float64]") -> "Columns":
    return {f"{quantity}_p{level:g}": row for level, row in zip(levels, values, strict=True)}


def _of_map(
    density: "maps.DustMap",
    l: "NDArray[np.float64]",
    b: "NDArray[np.float64]",
    distance: "NDArray[np.float64]",
    levels: Sequence[float],
) -> "Columns":
    """Ask a map; the std and percentiles of extinctions need samples."""
    from dustmap.sky._coordinates import places_at
    from dustmap.sky.maps._answers import spread_of
    from dustmap.sky.maps._quantities import COVERAGE

    places, answers = places_at(l, b, distance), {}
    if density.n_samples < 2:
        log.info(
            "no extinction_std and percentiles: the map has no samples, export it with --samples"
        )
    for quantity, integrated in _IS_INTEGRATED.items():
        answers[f"{quantity}_mean"] = density.query(places, integrated=integrated)
        spread = spread_of(density, places, integrated)
        if spread is not None:
            answers[f"{quantity}_std"] = spread
    for quantity, integrated in _IS_INTEGRATED.items() if levels else ():
        if integrated and density.n_samples < 2:
            continue  # the cubes of percentiles are those of densities
        values = density.query(places, "percentile", levels, integrated)
        answers |= _named(quantity, levels, values.T)
    if maps.Quantity.COVERAGE in density.available:
        answers[COVERAGE] = density.coverage(places)
    return answers


def add_predict(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "predict",
        "add predicted extinctions, densities and coverage to a catalog",
        "predict run1 --catalog places.csv --output predicted.csv",
        "predict run1 --catalog stars.fits --schema zgr23 --output predicted.fits",
        "predict run1 --catalog stars.fits --schema zgr23 --distances --output refined.fits",
    )
    command.add_argument("run", metavar="RUN")
    _options.add_catalog(command)
    _options.add_output(command, "ends in .fits, .csv, .ecsv, .parquet, .vot, .h5 or .npz")
    command.option(
        "--distances",
        "add the distances, in pc, that the measured extinctions leave possible: "
        "distance_mean, distance_std, distance_percentile16, 50 and 84",
    )
    _options.add_system(
        command, "with --distances: of the measured extinctions [what its header or card says]"
    )
    _options.add_compute_and_json(command, title=_options.COMPUTE_TITLE)


def execute_predict(options: argparse.Namespace) -> int:
    run = Path(options.run)
    output = _options.output_of(options, options.catalog, map_or_run=run, schema=options.schema)
    computing = _options.computing(options, run)
    card = _options.run_card_of(options)
    wanted = Path(options.catalog), card, output, options.overwrite
    if options.distances:
        opened = runs.open_star_map(run, computing)
        predict = partial(opened.predict, distances=True, system=options.system)
    elif options.system:
        raise UserError("predict: --system goes with --distances, which reads extinctions")
    else:
        predict = partial(runs.open_run(run, computing).predict)
    with progress() as shown:
        result = predict(*wanted, shown)
    return print_result(result, options.json)
