"""What the map of a tile says of itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dustmap.sky._zarr import open_checked
from dustmap.sky.maps import AbstractCubes, DustMap


def map_of_tile(path: Path) -> tuple[AbstractCubes, Mapping[str, Any]]:
    """The cubes of a tile's map.zarr, or of the run that has one; and its attribute `tile`."""
    place = path / "map.zarr" if (path / "config.toml").is_file() else path
    if not place.is_dir():
        raise ValueError(
            f"{path}: expected a run of a tile with its map.zarr, or that map.zarr; export.formats "
            "of such runs must have zarr"
        )
    cubes = DustMap.open(place).cubes
    told = open_checked(place, "the map of a tile").attrs.get("tile")
    if not isinstance(told, Mapping):
        raise ValueError(
            f"{path}: this map is not that of a tile: expected a run with data.tile, such as 2/17"
        )
    return cubes, dict(told)
