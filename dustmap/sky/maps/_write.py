"""Maps in files larger than memory, a slab at a time: FITS cubes, and zarr groups of version 3.

A FITS file is laid out first and filled by planes. A zarr group holds whole shards, so that every
file of it has one rank that writes it; coarser copies of the mean, for viewers, are in the style
of OME-NGFF 0.5.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import zarr
from astropy.io import fits
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.linalg import AbstractWorld
from dustmap.sky import _streamed_fits
from dustmap.sky._provenance import Provenance
from dustmap.sky._streamed_fits import ALONE, UnitPlan, printable, together
from dustmap.sky._zarr import Array, consolidate, create_array, create_group, opened_array
from dustmap.sky.maps import _cubes
from dustmap.sky.maps._cubes import DESCRIPTIONS, Cube, Layout
from dustmap.sky.maps._dust_map import DustMap
from dustmap.sky.maps._field import MEMORY, Slabs
from dustmap.sky.maps._field import slabs as slabs_of
from dustmap.sky.maps._quantities import Quantity, dimensions_of, variable_of

log = logging.getLogger(__name__)

#: Voxels per axis of a chunk, and at most of a shard, the file that holds chunks.
CHUNK, SHARD = 64, 512
#: Planes of a shard, at most: all shards of a slab are encoded at once.
DEEPEST = 256
GROUP = "multiscale"
_FRAME = "heliocentric Galactic cartesian: +X to l=0, +Y to l=90 deg, +Z to b=90 deg"
_TITLE = "3D map of the interstellar dust density"
#: Levels end where no axis has more voxels.
SMALLEST = 64
#: Planes of the coarser level that are made at once: one layer of chunks.
_DEPTH = 64


def write_map(
    path: str | Path,
    source: DustMap | Slabs,
    provenance: Provenance,
    overwrite: bool = False,
    memory: int = MEMORY,
    world: AbstractWorld = ALONE,
    form: str = "",
) -> None:
    """Write all that a map or the slabs of a field hold; the voxels' centres are the grid's nodes.

    zarr: density_mean, density_std, ... (z, y, x), density_samples (sample, z, y, x), the axes x,
    y, z in pc, and the group `multiscale`, the mean averaged over 2×2×2 voxels again and again;
    finer levels are groups of the same kind, level_1 and on, named by the attribute `levels`.
    FITS: one image [z, y, x] a quantity and a sample, with a linear WCS of X, Y, Z in pc: MEAN,
    STD., MEDIAN, P16, P84, COVERAGE, SAMPLE_01 and on, each with checksums and provenance; of
    finer levels MEAN_L1, STD_L1, .. and on.

    Parameters
    ----------
    memory
        Bytes that slabs take, of every rank. Where 64 planes are more, chunks of zarr are thinner.
    world
        Ranks that have the field, and share its planes.
    form
        "zarr" or "fits"; as the name ends by default.

    Raises
    ------
    UserError
        Where the name ends in neither, and no form is given.

    Examples
    --------
    >>> from dustmap.gp import RegularGrid
    >>> grid = RegularGrid((-100.0,) * 3, (50.0,) * 3, (5,) * 3)
    >>> density = DustMap.from_nodes(grid, np.full(125, 0.002), None, "A_V")
    >>> write_map("map.fits", density, Provenance("", ("a uniform density",)))
    >>> DustMap.open("map.fits").mean.shape
    (5, 5, 5)
    """
    path = Path(path)
    write = _WRITERS[form or form_of(path)]
    slabs = Slabs.of_cubes(source.cubes) if isinstance(source, DustMap) else source
    with _streamed_fits.replacing_together(path, overwrite, world) as partial:
        write(partial, slabs, provenance, memory, world)


def form_of(path: Path) -> str:
    """Return the form of a map, zarr or fits, by the ending of its name.

    Examples
    --------
    >>> form_of(Path("map.zarr")), form_of(Path("map.fits"))
    ('zarr', 'fits')
    """
    form = path.suffix.lower().removeprefix(".")
    if form not in _WRITERS:
        raise UserError(f"{path}: expected a name that ends in .zarr or .fits")
    return form


def _write_fits(
    path: Path, slabs: Slabs, provenance: Provenance, memory: int, world: AbstractWorld
) -> None:
    levels = (slabs, *slabs.finer)
    plans = [
        UnitPlan.image(
            _cubes.extension_of(cube, level),
            each.layout.shape,
            _cards(each.layout, cube, provenance),
        )
        for level, each in enumerate(levels)
        for cube in each.layout.cubes
    ]
    with _streamed_fits.streamed_fits(path, plans, world) as images:
        for level, each in enumerate(levels):
            planes = each.layout.shape[0]
            # Half for the slab, half for its bytes in the order of the file.
            depth = min(each.depth(memory // 2), planes)
            for slab in each.walk(depth, world.share(planes)):
                log.debug("%s: planes %d to %d of %d", path, slab.start, slab.stop, planes)
                for cube in each.layout.cubes:
                    image = images[_cubes.extension_of(cube, level)]
                    image.write((slab.start,), cube.of(slab.arrays[cube.quantity.value]))


def _cards(layout: Layout, cube: Cube, provenance: Provenance) -> fits.Header:
    described = DESCRIPTIONS[cube.quantity]
    header = _streamed_fits.axis_cards(
        layout.grid, "XYZ", "pc", [_axis_meaning(axis) for axis in "xyz"]
    )
    if described.unit:
        header["BUNIT"] = described.unit
    header["EXTSYS"] = (printable(layout.system.name), "system of the extinction")
    if cube.quantity is Quantity.SAMPLES:
        header["SAMPLE"] = (cube.sample + 1, f"of {layout.samples} stored")
    # A long value goes on in the next cards, where no comment may follow.
    header["PERCENT"] = _cubes.PERCENTILES_OF[layout.positive]
    if between := _between(layout):
        header["BETWEEN"] = " ".join(f"{value:.4g}" for value in between["between"])
        header["BETWGRID"] = " ".join(f"{value:.15g}" for value in between["between_grid"])
    header["OBJECT"] = described.meaning
    provenance.stamp(header)
    return header


def _axis_meaning(name: str) -> str:
    return f"heliocentric Galactic {name.upper()}"


def _write_zarr(
    path: Path, slabs: Slabs, provenance: Provenance, memory: int, world: AbstractWorld
) -> None:
    layout = slabs.layout
    depth, thickness = _depths(slabs, int(world.gathered(torch.tensor([memory])).min()))
    with together(world):
        if world.rank == 0:
            _lay_out(path, layout, provenance, depth, thickness)
    with together(world):
        group, arrays = _opened(path, layout)
        for slab in slabs.walk(depth, _share(layout.shape[0], depth, world)):
            log.debug("%s: planes %d to %d of %d", path, slab.start, slab.stop, layout.shape[0])
            for quantity, array in arrays.items():
                _put(array, slab.start, slab.stop, slab.arrays[quantity.value])
    if Quantity.MEAN in arrays:
        add_multiscale(group, arrays[Quantity.MEAN], layout.grid, world)
    for level, finer in enumerate(slabs.finer, start=1):
        _write_zarr(path / _cubes.level_path(level), finer, provenance, memory, world)
    with together(world):
        if world.rank == 0:
            if slabs.finer:
                group.attrs["levels"] = [
                    {"path": _cubes.level_path(level), **_place(finer.layout)}
                    for level, finer in enumerate(slabs.finer, start=1)
                ]
            consolidate(group)


def _place(layout: Layout) -> dict[str, Any]:
    """Voxels of a level in pc, in the order of its arrays."""
    grid = layout.grid
    return {
        "shape": list(layout.shape),
        "scale": list(grid.spacing[::-1]),
        "translation": list(grid.lower[::-1]),
        "unit": "parsec",
    }


Writer: TypeAlias = Callable[[Path, Slabs, Provenance, int, AbstractWorld], None]
_WRITERS: dict[str, Writer] = {"zarr": _write_zarr, "fits": _write_fits}


def _lay_out(
    path: Path, layout: Layout, provenance: Provenance, depth: int, thickness: int
) -> None:
    """All but the numbers."""
    axes = {}
    for name, axis in zip("xyz", layout.grid.axes(), strict=True):
        described = {"units": "pc", "axis": name.upper(), "long_name": _axis_meaning(name)}
        axes[name] = axis.numpy(), described
    group = create_group(path, _attributes(layout, provenance), axes)
    for quantity in layout.quantities:
        _create(group, layout, quantity, depth, thickness)


def _opened(path: Path, layout: Layout) -> tuple[zarr.Group, dict[Quantity, Array]]:
    # Files do not say whether chunks of nothing but fill values are written: the one that opens
    # them does.
    with zarr.config.set({"array.write_empty_chunks": True}):
        group = zarr.open_group(path, mode="r+")
        return group, {q: opened_array(group, variable_of(q)) for q in layout.quantities}


def _share(planes: int, depth: int, world: AbstractWorld) -> slice:
    """This rank's planes: whole shards, but for the last layer."""
    layers = world.share(-(-planes // depth))
    return slice(min(layers.start * depth, planes), min(layers.stop * depth, planes))


def _depths(slabs: Slabs, memory: int) -> tuple[int, int]:
    """Planes of a shard, a multiple of those of a chunk, and of a chunk."""
    planes = slabs.layout.shape[0]
    # Two more arrays are in flight while one is encoded.
    fit = slabs.depth(memory, extra=2)
    thickness = min(CHUNK, planes)
    while thickness > fit:
        thickness = -(-thickness // 2)
    layers = min(fit // thickness, DEEPEST // thickness, -(-planes // thickness))
    return layers * thickness, thickness


def _create(
    group: zarr.Group, layout: Layout, quantity: Quantity, depth: int, thickness: int
) -> None:
    described = DESCRIPTIONS[quantity]
    sample = (1,) if quantity is Quantity.SAMPLES else ()
    chunks, shards = _tiles(layout.shape[1:])
    create_array(
        group,
        variable_of(quantity),
        (*layout.request.leading(quantity), *layout.shape),
        dimensions_of(quantity),
        chunks=(*sample, thickness, *chunks),
        shards=(*sample, depth, *shards),
        attributes={
            "units": described.unit or "1",
            "long_name": described.meaning,
            "ucd": described.ucd,
            "extinction_system": layout.system.name,
        },
    )


def _tiles(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Chunks and shards: a shard is whole chunks, no more than the axis needs."""
    chunks = tuple(min(CHUNK, n) for n in shape)
    shards = tuple(
        chunk * min(-(-n // chunk), SHARD // chunk) for n, chunk in zip(shape, chunks, strict=True)
    )
    return chunks, shards


def _put(array: Array, start: int, stop: int, values: np.ndarray) -> None:
    """Planes start to stop; a sample at a time, so that its shards are all that is in flight."""
    if values.ndim == 3:
        array[start:stop] = values
        return
    for sample, cube in enumerate(values):
        array[sample, start:stop] = cube


def _attributes(layout: Layout, provenance: Provenance) -> Mapping[str, Any]:
    seed = {} if provenance.seed is None else {"seed": provenance.seed}
    return {
        "Conventions": "CF-1.11",
        # Strict checkers object to any unit of astronomy.
        "comment": "units as astropy reads them: UDUNITS knows neither mag nor pc",
        **provenance.attributes(_TITLE),
        "catalog": list(provenance.catalog),
        **seed,
        "extinction_system": layout.system.name,
        "extinction_system_meaning": layout.system.meaning,
        "frame": _FRAME,
        "percentiles": _cubes.PERCENTILES_OF[layout.positive],
        **_between(layout),
        **({"tile": dict(provenance.tile)} if provenance.tile else {}),
    }


def _between(layout: Layout) -> dict[str, list[float]]:
    """The variance between the nodes of the run, and these, where there is any."""
    if not layout.between:
        return {}
    return {
        "between": [value for rest in layout.between for value in rest.table],
        "between_grid": [value for rest in layout.between for value in rest.placed],
    }


def add_multiscale(group: zarr.Group, mean: Array, grid: RegularGrid, world: AbstractWorld) -> None:
    """Write multiscale/1, /2, ...: means of the density over 2×2×2, 4×4×4, ... voxels.

    Where an axis has an odd number of voxels the last is averaged with those beside it only. The
    attribute `ome` of `multiscale` names these levels, that of the root the map itself, too. world:
    ranks that share the layers of chunks of every level.
    """
    shapes = _shapes(mean.shape)
    with together(world):
        if world.rank == 0:
            _lay_out_levels(group, mean.basename, shapes, grid)
    finer = mean
    for name in shapes:
        with together(world):
            coarser = opened_array(group, f"{GROUP}/{name}")
            _average(finer, coarser, world)
        finer = coarser


def _shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of the levels by their names."""
    shapes: dict[str, tuple[int, ...]] = {}
    while max(shape) > SMALLEST:
        shape = tuple(-(-n // 2) for n in shape)
        shapes[str(len(shapes) + 1)] = shape
    return shapes


def _lay_out_levels(
    group: zarr.Group, mean: str, shapes: dict[str, tuple[int, ...]], grid: RegularGrid
) -> None:
    """All but the numbers."""
    levels = group.create_group(GROUP)
    for name, shape in shapes.items():
        chunks = tuple(min(_DEPTH, n) for n in shape)
        create_array(levels, name, shape, ("z", "y", "x"), chunks=chunks)
    levels.attrs["ome"] = _metadata({name: int(name) for name in shapes}, grid)
    named = {mean: 0} | {f"{GROUP}/{name}": int(name) for name in shapes}
    group.attrs["ome"] = _metadata(named, grid)


def _average(finer: Array, coarser: Array, world: AbstractWorld) -> None:
    """This rank's layers of chunks of a level."""
    planes = coarser.shape[0]
    for start, stop in slabs_of(planes, _DEPTH, _share(planes, _DEPTH, world)):
        coarser[start:stop] = halved(np.asarray(finer[2 * start : 2 * stop], np.float32))


def halved(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Average over 2×2×2 voxels; the last of an odd axis counts twice, with itself."""
    values = np.pad(values, [(0, n % 2) for n in values.shape], mode="edge")
    for axis in range(3):
        even, odd = (values[(*(slice(None),) * axis, slice(i, None, 2))] for i in (0, 1))
        values = 0.5 * (even + odd)
    return values


def _metadata(levels: dict[str, int], grid: RegularGrid) -> dict[str, Any]:
    """levels: path to the number of halvings."""
    datasets = []
    for path, level in levels.items():
        step = 2**level
        # The centre of a coarse voxel is that of the fine ones it covers.
        scale = [step * h for h in grid.spacing[::-1]]
        shifted = zip(grid.lower[::-1], grid.spacing[::-1], strict=True)
        translation = [low + 0.5 * (step - 1) * h for low, h in shifted]
        transformations = [
            {"type": "scale", "scale": scale},
            {"type": "translation", "translation": translation},
        ]
        datasets.append({"path": path, "coordinateTransformations": transformations})
    axes = [{"name": name, "type": "space", "unit": "parsec"} for name in "zyx"]
    described = {"name": "density_mean", "type": "mean", "axes": axes, "datasets": datasets}
    return {"version": "0.5", "multiscales": [described]}
