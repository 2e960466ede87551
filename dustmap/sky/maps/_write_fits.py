"""Maps as FITS cubes, larger than memory: laid out first, filled by slabs."""

import logging
from pathlib import Path

from astropy.io import fits

from dustmap import __version__
from dustmap.gp import RegularGrid
from dustmap.linalg import AbstractWorld
from dustmap.sky._provenance import Provenance
from dustmap.sky._ranks import ALONE, replacing_together
from dustmap.sky._streamed_fits import ImagePlan, printable, streamed_fits
from dustmap.sky.maps._cubes import Cube, Layout
from dustmap.sky.maps._field import AbstractDensityField
from dustmap.sky.maps._names import DESCRIPTIONS, PERCENTILES_OF, axis_meaning, sample_extension
from dustmap.sky.maps._request import MapRequest, Quantity
from dustmap.sky.maps._slabs import MEMORY, Slabs

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
    names = {cube: _extension(cube) for cube in layout.cubes}
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


def _extension(cube: Cube) -> str:
    if cube.quantity is Quantity.SAMPLES:
        return sample_extension(cube.sample)
    return DESCRIPTIONS[cube.quantity].extension


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
