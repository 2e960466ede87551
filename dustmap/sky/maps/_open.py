"""Finds the map that a path means."""

from pathlib import Path

from dustmap.sky.maps._cubes import AbstractCubes

_EXPECTED = "expected a run directory, a map.zarr or a map.fits"


def cubes_at(path: Path) -> AbstractCubes:
    """Of a run's directory, a map.zarr or a map.fits."""
    if any((path / name).is_file() for name in ("zarr.json", ".zgroup")):
        from dustmap.sky.maps._zarr_cubes import ZarrCubes  # a FITS file waits for no zarr

        return ZarrCubes(path)
    if path.is_file():
        if path.suffix.lower() in {".fits", ".fit"}:
            from dustmap.sky.maps._fits_cubes import FitsCubes

            return FitsCubes(path)
        raise ValueError(f"{path}: {_EXPECTED}")
    for name in ("map.zarr", "map.fits"):
        if (path / name).exists():
            return cubes_at(path / name)
    if (path / "config.toml").is_file():
        raise FileNotFoundError(f"{path}: the run has no map; write one with dustmap export")
    raise FileNotFoundError(f"{path}: {_EXPECTED}")
