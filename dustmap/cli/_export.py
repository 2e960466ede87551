"""dustmap export and merge: the map of a run on any grid, and the maps of tiles as one."""

import argparse
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustmap import runs
from dustmap.cli import _options
from dustmap.cli._console import print_plan, print_result, progress
from dustmap.config import parsecs
from dustmap.errors import UserError
from dustmap.sky import figures, layouts, maps, view

if TYPE_CHECKING:
    from dustmap.gp import RegularGrid

log = logging.getLogger(__name__)

#: Our own cubes, which take --box and --step; the layouts of published maps; of these, those of
#: shells around the Sun, which take --nside, and --distances where the layout leaves them open.
CUBES = ("zarr", "fits")
LAYOUTS = ("healpix", "edenhofer2023", "leike2020", "bayestar", "gtomo")
#: Surfaces of constant density.
SCENE = "glb"
BOXED, PIXELS, BINNED = (*CUBES, "gtomo", SCENE), LAYOUTS[:2] + LAYOUTS[3:4], LAYOUTS[:2]
#: Layouts that have no place for quantities of your choice, and what they have.
FIXED = {"leike2020": "mean and std", SCENE: "surfaces of the mean"}
#: What others have a place for, together in one file.
PLACES = {
    "edenhofer2023": ("mean,std", "samples"),
    "bayestar": ("mean,samples", "samples"),
    "gtomo": ("mean", "std", "median", "p16", "p84"),
}
SUFFIXES = {".zarr": "zarr", ".fits": "fits"}
_FITS, _HDF5 = (".fits", ".fit"), (".h5", ".hdf5")
#: Endings of names by which readers know what a file is.
ENDINGS = {
    "zarr": (".zarr",),
    "fits": _FITS,
    "healpix": _FITS,
    "edenhofer2023": _FITS,
    "leike2020": _HDF5,
    "bayestar": _HDF5,
    "gtomo": (*_FITS, *_HDF5),
    SCENE: (".glb",),
}


def add_export(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "export",
        "write a run's map on any grid, as published maps are laid out, or as surfaces",
        "export run1 --format fits --output map.fits",
        "export run1 --format zarr --output part.zarr --box -100 100 -100 100 -50 50 --step 5pc",
        "export run1 --format zarr --output draws.zarr --quantity mean,std,samples --samples 12",
        "export run1 --format healpix --output map_hp.fits --nside 64 --distances 20 300 100",
        "export run1 --format healpix --output shells.fits --nside 64 --shells 50 100 0.2kpc",
        "export map.zarr --format glb --output dust.glb --iso 0.002 0.005 0.01",
    )
    command.add_argument(
        "run", metavar="RUN|MAP", help="a run; for glb also a map.zarr or a map.fits"
    )
    command.add_argument("--format", choices=(*CUBES, *LAYOUTS, SCENE), required=True)
    _options.add_output(command, "the file")
    command.option("--box X0 X1 Y0 Y1 Z0 Z1", "of a map of dust; the run's by default")
    command.option("--step PC", "between voxels; the run's by default")
    command.option(
        "--nside N",
        "pixels of shells [64; healpix: no more than voxels at the farthest face resolve]",
        type=int,
    )
    command.option(
        "--distances D0 D1 N",
        "N bins of distance, equal in the logarithm, to the farthest face of the box [516; "
        "healpix: no more than voxels resolve]",
    )
    command.option(
        "--shells PC...", "healpix: shells at exactly these distances, such as 50 100 0.2kpc"
    )
    command.option(
        "--quantity NAME,NAME",
        "of mean, std, median, p16, p84, coverage, samples; [export] of the run by default",
    )
    command.option("--samples N", "how many samples", type=int)
    command.option(
        "--iso MAG/PC...",
        "glb: densities of the surfaces [3, 6 and 12 times the mean, up to the largest]",
        type=float,
    )
    command.option("--clouds FILE", "glb: mark the clouds of this table")
    command.option("--dry-run", "say what would be done, and stop (zarr and fits)")
    _options.add_compute_and_json(command, title=_options.COMPUTE_TITLE)


def execute_export(options: argparse.Namespace) -> int:
    run = Path(options.run)
    output = _options.output_of(options, options.clouds, map_or_run=run)
    _refuse_idle_options(options)
    if options.format == SCENE:
        view.check_scene(output)
    if options.format == SCENE and not _options.is_run(run):
        return _export_map(options)
    if run.suffix.lower() in (".zarr", ".fits", ".fit") and not _options.is_run(run):
        raise UserError(
            f"{run} is a map in a file, of which only --format {SCENE} is made: give the run that "
            "it is of, or take DustMap.open(...).to_xarray() or .to_healpix() in Python"
        )
    compute = _options.computing(options, run)
    regression = runs.regression_at(run, compute)
    if regression is not None:
        return _export_regression(regression, options)
    finished = runs.open_star_map(run, compute)
    if options.dry_run:
        return print_plan(_plan(finished, options), None, options.json)
    result = _write(finished, output, options)
    return print_result({"output": str(output), "format": options.format, **result}, options.json)


def _refuse_idle_options(options: argparse.Namespace) -> None:
    """An option that the format has no use for would be a wish that is passed over."""
    for value, name, takers in (
        (options.box, "--box", BOXED),
        (options.step, "--step", BOXED),
        (options.nside, "--nside", PIXELS),
        (options.distances, "--distances", BINNED),
        (options.shells, "--shells", ("healpix",)),
        (options.iso, "--iso", (SCENE,)),
        (options.clouds, "--clouds", (SCENE,)),
        (options.dry_run or None, "--dry-run", CUBES),
    ):
        if value is not None and options.format not in takers:
            raise UserError(f"{name}: --format {options.format} has none; {', '.join(takers)} do")
    if options.distances is not None and options.shells is not None:
        raise UserError("--distances, --shells: expected one of them")
    suffix, own = Path(options.output).suffix.lower(), ENDINGS[options.format]
    if suffix not in own and any(suffix in endings for endings in ENDINGS.values()):
        raise UserError(
            f"--output {options.output}: --format {options.format} is no {suffix}, expected "
            f"{' or '.join(own)}"
        )
    if options.format == "fits" and suffix not in own:
        raise UserError(
            f"--output {options.output}: expected a name that ends in .fits, by which "
            "commands know a map"
        )
    if options.format in FIXED and (options.quantity or options.samples):
        words = f"--format {options.format} is always {FIXED[options.format]}"
        raise UserError(f"--quantity, --samples: {words}")
    _refuse_other_quantities(options)


def _refuse_other_quantities(options: argparse.Namespace) -> None:
    """Refuse quantities other than those that the file has."""
    if options.format not in PLACES or not (options.quantity or options.samples):
        return
    names = {name.strip() for name in (options.quantity or "samples").split(",")}
    names |= {"samples"} if options.samples else set()
    places = PLACES[options.format]
    if names not in [set(place.split(",")) for place in places]:
        raise UserError(
            f"--quantity: a file of --format {options.format} has {' or '.join(places)}"
        )


def _plan(finished: "runs.StarMap", options: argparse.Namespace) -> "runs.Plan":
    request = _request(finished, finished.field(), options)
    return runs.export_plan(finished, _grid(finished, options), request)


def _write(finished: "runs.StarMap", output: Path, options: argparse.Namespace) -> dict[str, Any]:
    field, grid = finished.field(), _grid(finished, options)
    finer = finished.finer if options.box is None and options.step is None else ()
    request, provenance = _request(finished, field, options), finished.made
    _warn_of_voxels(finished, grid, options)
    with progress() as shown:
        watched = runs.WatchedField(field, f"writing {output.name}", shown)
        if options.format == SCENE:
            whole = maps.finest_grid(grid, (level.spacing for level in finer))
            mean = maps.DustMap.from_field(watched, whole, maps.MapRequest((maps.Quantity.MEAN,)))
            return _write_scene(mean, options, provenance.history())
        if options.format in CUBES:
            compute, kind = finished.run.config.compute, options.format
            runs.check_export(runs.export_plan(finished, grid, request), grid, request, output)
            slabs = maps.Slabs.of_field(watched, grid, request, finer)
            runs.write_in_slabs(output, slabs, provenance, options.overwrite, compute, kind)
            return {
                "voxels": list(grid.shape),
                "quantities": [quantity.value for quantity in request.quantities],
                "samples": request.samples,
            }
        asked = _layout(request, grid, finer, options)
        writer = layouts.LAYOUTS[options.format]
        counts = writer(output, watched, asked, provenance, options.overwrite)
    return {"values": counts.values, "outside_the_box": counts.outside, "raised": counts.raised}


def _warn_of_voxels(
    finished: "runs.StarMap", grid: "RegularGrid", options: argparse.Namespace
) -> None:
    """Say what a cube of one spacing leaves of the nodes and levels of a run."""
    if options.format not in BOXED or options.format == SCENE:
        return
    if options.box is None and options.step is None:
        if finished.finer and options.format not in CUBES:
            words = "the coarsest level's; --box or --step for finer ones"
            log.warning("a cube of one spacing: %g pc, %s", grid.spacing[0], words)
        return
    level = _level_of(grid, (finished.run.grid, *finished.finer))
    if level is None:
        log.warning(
            "one spacing, %g pc, of several levels: in the cells where one level meets another, "
            "answers of this file are not the run's",
            grid.spacing[0],
        )
    elif not _has_nodes(grid, level):
        log.warning(
            "voxels %g pc apart, from X %g, Y %g, Z %g pc on, without all of the run's nodes, %g "
            "pc apart, from X %g, Y %g, Z %g pc on: between voxels answers of this file are not "
            "the run's, and standard deviations are mostly too small",
            *(grid.spacing[0], *grid.lower, level.spacing[0], *level.lower),
        )


def _level_of(grid: "RegularGrid", levels: "Sequence[RegularGrid]") -> "RegularGrid | None":
    """Return the finest that a box meets, of levels from the coarsest on; None where it has not all
    of the box."""

    def faces(level: "RegularGrid") -> Iterator[tuple[float, float, float, float]]:
        return zip(level.lower, grid.lower, grid.upper, level.upper, strict=True)

    met = [
        level
        for level in levels
        if all(start < last and first < end for start, first, last, end in faces(level))
    ]
    inside = all(start <= first and last <= end for start, first, last, end in faces(met[-1]))
    return met[-1] if inside else None


def _has_nodes(grid: "RegularGrid", level: "RegularGrid") -> bool:
    """Whether the nodes of a level are voxels, as far as these go."""
    steps = zip(level.spacing, level.lower, grid.spacing, grid.lower, strict=True)
    parts = ((own / step, (first - low) / step) for own, low, step, first in steps)
    return all(abs(part - round(part)) < 1e-6 for pair in parts for part in pair)


def _export_map(options: argparse.Namespace) -> int:
    """Write the scene of a map in a file."""
    path = Path(options.run)
    idle = _set_options(options, ("box", "step", "dry_run"))
    if idle:
        raise UserError(f"{idle}: for runs, and {path} is a map")
    result = _write_scene(_options.map_at(options, path), options, ())
    return print_result({"output": options.output, "format": SCENE, **result}, options.json)


def _set_options(options: argparse.Namespace, names: Sequence[str]) -> str:
    """List those of the named options that are given, as they are written."""
    set_names = (name for name in names if getattr(options, name) not in (None, False))
    return ", ".join(f"--{name.replace('_', '-')}" for name in set_names)


def _write_scene(
    density: "maps.DustMap", options: argparse.Namespace, history: Sequence[str]
) -> dict[str, Any]:
    """Write surfaces, the Sun and clouds; return what was written."""
    import numpy as np

    names: list[str] = []
    places = np.empty((0, 3))
    if options.clouds is not None:
        marks = figures.CloudMarks.read(Path(options.clouds))
        known = [name.partition(";")[0] for name in marks.names]
        names = [name or f"cloud {k}" for k, name in enumerate(known, 1)]
        places = marks.places
    made_by = (*history, _options.command_line(options))
    scene = view.scene_at(density, options.iso or (), names, places, made_by)
    scene.save(options.output, options.overwrite)
    return {
        "levels": [surface.level for surface in scene.surfaces],
        "triangles": scene.triangles,
        "points": len(names),
        "bytes": scene.size,
    }


def _grid(finished: "runs.StarMap", options: argparse.Namespace) -> "RegularGrid":
    if options.box is None and options.step is None:
        return finished.run.grid
    box = None if options.box is None else [parsecs(face) for face in options.box]
    return finished.grid(box, None if options.step is None else parsecs(options.step))


def _request(
    finished: "runs.StarMap", field: "maps.AbstractDensityField", options: argparse.Namespace
) -> "maps.MapRequest":
    """Return the request of the options, or that of the [export] section of the run."""
    export = finished.run.config.export
    most = min(export.samples, field.n_samples)
    samples = most if options.samples is None else options.samples
    if options.format == "bayestar" and options.quantity is None and options.samples is None:
        samples = 0  # as many as such files have
    if options.quantity is None:
        # Of files that hold samples alone or other quantities, --samples asks for the former.
        alone = options.samples and "samples" in PLACES.get(options.format, ())
        names = (*(() if alone else export.quantities), *(("samples",) if samples else ()))
    else:
        names = tuple(name.strip() for name in options.quantity.split(","))
        if options.samples and "samples" not in names:
            names = (*names, "samples")
        if "samples" in names and not samples:
            raise UserError(f"--quantity samples: this run keeps {field.n_samples} samples")
    return maps.MapRequest.named(names, samples)


def _layout(
    request: "maps.MapRequest",
    grid: "RegularGrid",
    finer: tuple["RegularGrid", ...],
    options: argparse.Namespace,
) -> "layouts.LayoutRequest":
    bins, shells = None, None
    if options.shells is not None:
        shells = layouts.Shells(tuple(map(parsecs, options.shells)))
    if options.distances is not None:
        nearest, farthest, count = options.distances
        if not count.isdecimal():
            raise UserError(f"--distances {nearest} {farthest} {count}: expected a number of bins")
        bins = layouts.RadialBins(parsecs(nearest), parsecs(farthest), int(count))
    return layouts.LayoutRequest(request, grid, options.nside, bins, shells, finer)


def _export_regression(finished: "runs.RegressionResult", options: argparse.Namespace) -> int:
    if options.format not in CUBES:
        raise UserError(f"--format {options.format} is for maps of the dust; take zarr or fits")
    idle = _set_options(options, ("box", "step", "quantity", "samples", "dry_run"))
    if idle:
        raise UserError(
            f"{idle}: for maps of the dust; a regression is written on the nodes of its [grid], "
            f"and `dustmap predict` answers at places of your own"
        )
    result = finished.export(options.format, Path(options.output), options.overwrite)
    return print_result(result, options.json)


def add_merge(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "merge",
        "join the maps of tiles (data.tile) into one",
        "merge tiles/1-* --output map.zarr",
        "merge tiles/1-0 tiles/1-4 --output part.fits --partial",
    )
    command.add_argument(
        "tiles", metavar="TILE", nargs="+", help="runs with data.tile, or their map.zarr"
    )
    _options.add_output(command, "the merged map", "map.zarr")
    command.add_argument(
        "--format", choices=("zarr", "fits"), help="as --output ends by default, else zarr"
    )
    command.option("--partial", "voxels that no tile given reaches are NaN")
    _options.add_compute_and_json(command, ("memory",), "how it is computed")


def execute_merge(options: argparse.Namespace) -> int:
    memory = _options.compute_alone(options).memory_bytes
    output = _options.output_of(options, *options.tiles)
    form = _format(output, options.format)
    sky = runs.sky_of_tiles([Path(tile) for tile in options.tiles], options.partial)
    with progress() as shown:
        sky.write(output, form, options.overwrite, memory, shown)
    return print_result({"output": str(output), "format": form, **sky.counts()}, options.json)


def _format(output: Path, asked: str | None) -> str:
    """Return the format of the options; the name of the file must agree."""
    named = SUFFIXES.get(output.suffix.lower())
    if asked is not None and named not in (None, asked):
        raise UserError(f"--output {output}: --format {asked} is no {output.suffix}")
    if asked is None and named is None and output.suffix:
        raise UserError(f"--output {output}: expected a name that ends in {' or '.join(SUFFIXES)}")
    return asked or named or "zarr"
