"""dustmap clouds, compare and evaluate: dense structures, how a map agrees with others, scores."""

import argparse
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dustmap import runs, sky, tables
from dustmap.cli import _options
from dustmap.cli._console import print_result, progress
from dustmap.config import parsecs
from dustmap.errors import UserError
from dustmap.sky import agreement, clouds, figures, maps, systems

log = logging.getLogger(__name__)

#: Pixels of the sky whose rays are compared.
NSIDE = 32
#: Segments of these rays, in voxels of the map.
VOXELS = 2.0


def add_clouds(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "clouds",
        "dense structures of a map: place, distance, size, mass, names, from its samples",
        "clouds run1 --output clouds.ecsv",
        "clouds map.zarr --threshold 0.01 --contrast 2 --output clouds.fits",
        "clouds map.fits --names mine.csv --output clouds.ecsv --overwrite",
        about=(
            "A cloud is a peak of the mean density with all around it that is denser than the\n"
            "threshold. Its errors, and the probability that it is there, are from the samples."
        ),
    )
    _options.add_map(command)
    command.option(
        "--threshold MAG/PC", "density of its surface [three times the mean of the map]", type=float
    )
    command.option(
        "--contrast FACTOR",
        "of its peak over the threshold and over the saddle to a higher one [1.5]",
        type=float,
        default=1.5,
    )
    command.option("--voxels N", "that it has, at least [8]", type=int, default=8)
    command.option(
        "--names FILE",
        "known clouds: name, l, b and distance_pc [163 lines of sight of Zucker et al. 2020]",
    )
    _options.add_output(command, "the table: .ecsv, .fits or another that keeps units")
    _options.add_compute_and_json(command, ("memory",), "how it is computed")


def execute_clouds(options: argparse.Namespace) -> int:
    from dustmap.sky.clouds._clouds import default_threshold

    output = _options.output_of(options, options.names, map_or_run=options.map)
    if tables.table_format(output).bare:
        raise UserError(f"--output {output}: expected .ecsv, .fits or another that keeps units")
    known = clouds.NamedPlaces.read(Path(options.names) if options.names else None)
    density = _options.opened(options, Path(options.map)).on_one_grid()
    threshold = default_threshold(density) if options.threshold is None else options.threshold
    found = clouds.find_clouds(
        density, clouds.Criteria(threshold, options.contrast, options.voxels), known
    )
    table = found.table()
    table.meta["HISTORY"] = [_options.command_line(options)]
    tables.write_table(output, table, options.overwrite)
    return print_result({"output": str(output), **_summary(found)}, options.json)


def _summary(found: "clouds.Clouds") -> dict[str, Any]:
    """Count the clouds, and say by what they were found; JSON has no NaN."""
    import numpy as np

    mass = clouds.solar_masses(found.system) * float(found.mean.dust.sum())
    known = np.isfinite(found.name_distance)
    off = np.abs(found.mean.distance - found.name_distance)[known]
    share = off / found.name_distance[known]
    error = found.error("distance")[known]
    sure = int((found.probability >= 0.9).sum())
    return {
        "clouds": len(found),
        "clouds_in_nine_of_ten_samples": sure if found.samples else None,
        "clouds_with_a_name": sum(bool(name) for name in found.names),
        "median_difference_to_published_distances": float(np.median(share)) if len(off) else None,
        "published_distances_within_one_error": (
            float(np.mean(off <= error)) if len(off) and found.samples else None
        ),
        "mass_in_suns": mass if np.isfinite(mass) else None,
        "threshold": found.criteria.threshold,
        "samples": len(found.samples),
        "extinction_system": found.system.name,
    }


def add_compare(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "compare",
        "extinctions of a map beside those of other maps, published ones, and stars",
        "compare run1 run2 map.fits --output compared.ecsv --figure compared.png",
        "compare map.zarr edenhofer2023 bayestar=bayestar2019.h5 --output compared.ecsv",
        "compare run1 --catalog stars.fits --schema zgr23 --output compared.ecsv",
        about=(
            "RMSE, bias, slope and correlation of extinctions from the Sun (integrated) and of\n"
            "mean densities of segments of rays (differential), by distance and latitude, in the\n"
            "system of the map. OTHER is a run, a map.zarr, a map.fits, or a map that the\n"
            "dustmaps package queries: bayestar, edenhofer2023, iphas, leike2020,\n"
            "leike_ensslin_2019, marshall, or MODULE.CLASS of extinctions in --system; with =FILE\n"
            "where its data are not where dustmaps keeps them."
        ),
    )
    _options.add_map(command)
    command.add_argument("others", metavar="OTHER", nargs="*", help="what it is compared with")
    command.option("--catalog FILE", "measured extinctions of stars, too")
    _options.add_schema(command, "columns of it [generic]")
    _options.add_system(
        command, "of extinctions of MODULE.CLASS, and of a catalog that does not say"
    )
    command.option("--nside N", f"rays: HEALPix pixels [{NSIDE}]", type=int, default=NSIDE)
    command.option("--step PC", "length of segments [two voxels of the map]")
    command.option("--distance PC", "where rays end [the farthest face]")
    command.option("--figure FILE", "draw them, too: .png or .pdf")
    _options.add_output(command, "the scores: .ecsv, .fits, .csv")
    _options.add_compute_and_json(command, title=_options.COMPUTE_TITLE)


def execute_compare(options: argparse.Namespace) -> int:
    output, path = Path(options.output), Path(options.map)
    files = [name for other in options.others for name in _files(other)]
    inputs = list(_options.inputs_of(options.catalog, *files, map_or_run=path))
    for target in filter(None, (options.output, options.figure)):
        sky.check_output(Path(target), options.overwrite, inputs)
    tables.table_format(output)
    if options.figure:
        figures.check_picture(options.figure)
    if not options.others and options.catalog is None:
        raise UserError("compare: expected an OTHER or a --catalog to compare with")
    for name, default in {"distance": None, "step": None, "nside": NSIDE}.items():
        if not options.others and getattr(options, name) != default:
            raise UserError(
                f"--{name} is of the rays along which maps are compared, and stars have their own: "
                "leave it out"
            )
    if options.catalog is None or not _options.is_run(path):
        _options.refuse_device(options, "none is asked for extinctions of stars here")
    ours = _map_source(options, path)
    segments = _segments(options, ours.density)
    compared: list[agreement.Pairs] = []
    for source in _sources(options):
        compared += agreement.compare_maps(ours, source, segments)
    if options.catalog is not None:
        compared.append(_stars(options, ours.density))
    table = agreement.score_table(compared)
    table.meta["HISTORY"] = [_options.command_line(options)]
    tables.write_table(output, table, options.overwrite)
    if options.figure:
        history = (_options.command_line(options),)
        figures.save_figure(
            figures.agreement_figure(compared), options.figure, options.overwrite, history
        )
    return print_result(_printed(compared, options), options.json)


def _printed(compared: "list[agreement.Pairs]", options: argparse.Namespace) -> Mapping[str, Any]:
    """All pairs of each comparison; JSON has no NaN."""
    scores = {}
    for pairs in compared:
        score = vars(pairs.score())
        known = {name: None if value != value else value for name, value in score.items()}
        scores[f"{pairs.name}, {pairs.kind}"] = known
    written = {"output": options.output} | ({"figure": options.figure} if options.figure else {})
    return {**written, "extinction_system": compared[0].system.name, **scores}


def _files(other: str) -> list[str]:
    """Return the paths that an OTHER reads."""
    if _is_path(other):
        return [other]
    _, equals, file = other.partition("=")
    return [file] if equals else []


def _is_path(other: str) -> bool:
    looks_like_one = Path(other).suffix in (".zarr", ".fits") and "=" not in other
    return looks_like_one or Path(other).exists()


def _sources(options: argparse.Namespace) -> "Iterator[agreement.AbstractSource]":
    """All OTHERs; files of one published map are called as they are given."""
    names = [other.partition("=")[0] for other in options.others]
    for name, other in zip(names, options.others, strict=True):
        source = _source(options, other)
        yield replace(source, name=other) if names.count(name) > 1 else source


def _source(options: argparse.Namespace, other: str) -> "agreement.AbstractSource":
    if _is_path(other):
        return _map_source(options, Path(other))
    name, _, file = other.partition("=")
    return agreement.published_source(name, Path(file) if file else None, options.system)


def _map_source(options: argparse.Namespace, path: Path) -> "agreement.MapSource":
    return agreement.MapSource(str(path), _options.opened(options, path))


def _segments(options: argparse.Namespace, density: "maps.DustMap") -> "agreement.Segments":
    import numpy as np

    grid = density.grid
    step = VOXELS * min(grid.spacing) if options.step is None else parsecs(options.step)
    far = float(np.max(np.abs([grid.lower, grid.upper])))
    far = far if options.distance is None else parsecs(options.distance)
    if not 0.0 < step <= far:
        raise UserError(f"--step {step:g}, --distance {far:g}: expected 0 < step <= distance in pc")
    return agreement.Segments.of_pixels(
        options.nside, step * np.arange(int(far / step + 1e-9) + 1.0)
    )


def _stars(options: argparse.Namespace, density: "maps.DustMap") -> "agreement.Pairs":
    """Pair measured extinctions with those of a run, or of a map at the median distances."""
    from dustmap.sky._coordinates import places_at
    from dustmap.sky.agreement._scores import INTEGRATED

    catalog, card = Path(options.catalog), _options.card_of(options)
    if _options.is_run(Path(options.map)):
        finished = _options.star_map(options)
        stars = finished.read(catalog, card, options.system or "").stars
        away = stars.distance
        ours = finished.at_stars(stars.l, stars.b, stars.distances)["extinction_mean"]
    else:
        system = systems.system_named(options.system) if options.system else None
        stars = sky.read_catalog([catalog], card, system=system).stars
        away = stars.distance
        ours = density.query(places_at(stars.l, stars.b, away), integrated=True)
    theirs = systems.conversion(stars.system, density.system) * stars.extinction
    both = agreement.Pairs(options.catalog, INTEGRATED, density.system, theirs, ours, away, stars.b)
    pairs = both.known()
    log.info("%d of %d stars are outside the box", len(stars) - len(pairs), len(stars))
    if not len(pairs):
        raise UserError(f"{options.catalog}: none of its {len(stars)} stars is inside the map")
    return pairs


def add_evaluate(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "evaluate",
        "score a run on another catalog",
        "evaluate run1 --catalog more-stars.fits --json",
        "evaluate run1 --catalog sky.csv --schema ananke --truth-column noise_free",
    )
    command.add_argument("run", metavar="RUN")
    _options.add_catalog(command)
    command.option(
        "--truth-column NAME", "noise-free extinctions, to be scored without the noise", default=""
    )
    _options.add_system(
        command, "of its extinctions [its header's, its card's or data.system of the run]"
    )
    _options.add_compute_and_json(command, title=_options.COMPUTE_TITLE)


def execute_evaluate(options: argparse.Namespace) -> int:
    run = Path(options.run)
    finished = runs.open_run(run, _options.computing(options, run))
    card = _options.run_card_of(options)
    arguments = Path(options.catalog), card, options.truth_column, options.system
    with progress() as shown:
        result = finished.evaluate(*arguments, shown)
    return print_result(result, options.json)
