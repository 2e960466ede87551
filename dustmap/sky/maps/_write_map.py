"""A map at hand as a file."""

from pathlib import Path

from dustmap.sky._provenance import Provenance
from dustmap.sky.maps._dust_map import DustMap
from dustmap.sky.maps._slabs import MEMORY, Slabs
from dustmap.sky.maps._write_fits import fits_of_slabs
from dustmap.sky.maps._write_zarr import zarr_of_slabs

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
