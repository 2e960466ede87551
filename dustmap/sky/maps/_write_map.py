"""Maps as FITS cubes, larger than memory, and maps at hand as what their name ends in.

A FITS file is laid out first and filled by slabs.
"""

import logging
from pathlib import Path

from astropy.io import fits

from dustmap import __version__
from dustmap.gp import RegularGrid
from dustmap.linalg import AbstractWorld
from dustmap.sky._provenance import Provenance
from dustmap.sky._ranks import ALONE, replacing_together
from dustmap.sky._streamed_fits import ImagePlan, printable, streamed_fits
from dustmap.sky.maps._cubes import (
    DESCRIPTIONS,
    PERCENTILES_OF,
    Cube,
    Layout,
    axis_meaning,
    extension_of,
)
from dustmap.sky.maps._dust_map import DustMap
from dustmap.sky.maps._field import MEMORY, AbstractDensityField, Slabs
from dustmap.sky.maps._quantities import MapRequest, Quantity
from dustmap.sky.maps._write_zarr import zarr_of_slabs

log = logging.getLogger(__name__)


def write_fits(
    path: str | Path,
    field: AbstractDensityField,
    grid: RegularGrid,
    request: MapRequest,
    provenance: Provenance,
    overwrite: bool = False,
    memory: int = MEMORY,
    world: AbstractWorld = ALONE,
) -> None:
    """Writes one image [z, y, x] a quantity and a sample, with a linear WCS of X, Y, Z in pc.

    The voxels' centres are the nodes of `grid`. MEAN, STD., MEDIAN, P16, P84, COVERAGE, SAMPLE_01
    and on; every unit carries checksums and where it came from. memory: bytes that slabs take, of
    every rank. world: ranks that have the field, which share the planes.
    """
    slabs = Slabs.of_field(field, grid, request)
    fits_of_slabs(Path(path), slabs, provenance, overwrite, memory, world)


def fits_of_slabs(
    path: Path,
    slabs: Slabs,
    provenance: Provenance,
    overwrite: bool,
    memory: int,
    world: AbstractWorld = ALONE,
) -> None:
    """`write_fits` of planes wherever they come from."""
    layout = slabs.layout
    names = {cube: extension_of(cube) for cube in layout.cubes}
    plans = [
        ImagePlan(name, layout.shape, _cards(layout, cube, provenance))
        for cube, name in names.items()
    ]
    # Half for the slab, half for its bytes in the order of the file.
    depth = min(slabs.depth(memory // 2), layout.shape[0])
    with (
        replacing_together(path, overwrite, world) as partial,
        streamed_fits(partial, plans, world) as images,
    ):
        for slab in slabs.walk(depth, world.share(layout.shape[0])):
            log.debug("%s: planes %d to %d of %d", path, slab.start, slab.stop, layout.shape[0])
            for cube, name in names.items():
                values = slab.arrays[cube.quantity.value]
                sample = cube.quantity is Quantity.SAMPLES
                images[name].write((slab.start,), values[cube.sample] if sample else values)


def _cards(layout: Layout, cube: Cube, provenance: Provenance) -> fits.Header:
    described, grid = DESCRIPTIONS[cube.quantity], layout.grid
    header = fits.Header()
    for i, axis in enumerate("xyz"):
        header[f"CTYPE{i + 1}"] = axis.upper()
        header[f"CUNIT{i + 1}"] = "pc"
        header[f"CRPIX{i + 1}"] = (1.0, "centre of the first voxel")
        header[f"CRVAL{i + 1}"] = grid.lower[i]
        header[f"CDELT{i + 1}"] = grid.spacing[i]
        header[f"CNAME{i + 1}"] = axis_meaning(axis)
    if described.unit:
        header["BUNIT"] = described.unit
    header["EXTSYS"] = (printable(layout.system.name), "system of the extinction")
    if cube.quantity is Quantity.SAMPLES:
        header["SAMPLE"] = (cube.sample + 1, f"of {layout.samples} stored")
    # A long value goes on in the next cards, where no comment may follow.
    header["PERCENT"] = PERCENTILES_OF[layout.positive]
    header["OBJECT"] = described.meaning
    header["DATE"] = (provenance.date, "UTC")
    header["CREATOR"] = "dustmap"
    header["VERSION"] = __version__
    for line in provenance.history():
        header.add_history(printable(line))
    return header


_WRITERS = {".zarr": zarr_of_slabs, ".fits": fits_of_slabs}


def check_map_name(path: Path) -> None:
    """Whether `write_map` can tell from the name what to write."""
    if path.suffix.lower() not in _WRITERS:
        raise ValueError(f"{path}: expected a name that ends in {' or '.join(_WRITERS)}")


def write_map(
    path: str | Path, density: DustMap, provenance: Provenance, overwrite: bool = False
) -> None:
    """Writes all that a map holds, as its name ends: .zarr or .fits."""
    path = Path(path)
    check_map_name(path)
    slabs = Slabs.of_cubes(density.cubes)
    _WRITERS[path.suffix.lower()](path, slabs, provenance, overwrite, MEMORY)
