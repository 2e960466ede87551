"""Reads the cubes of a map.zarr."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.errors import NodeNotFoundError

from dustmap.sky.maps._cubes import AbstractCubes, Box, Cube, Layout, grid_of_axes
from dustmap.sky.maps._names import DESCRIPTIONS
from dustmap.sky.maps._request import Quantity
from dustmap.sky.systems import system_named


@final
@dataclass(frozen=True)
class ZarrCubes(AbstractCubes):
    """density_mean and its like, (z, y, x), density_samples (sample, z, y, x)."""

    path: Path

    def __post_init__(self) -> None:
        _ = self.layout

    @cached_property
    def layout(self) -> Layout:
        group = self._group
        held = {name for name, _ in group.arrays()}
        quantities = tuple(q for q, named in DESCRIPTIONS.items() if named.variable in held)
        if Quantity.MEAN not in quantities and Quantity.SAMPLES not in quantities:
            raise ValueError(
                f"{self.path}: expected the variable density_mean, got {sorted(held)}; is it a map?"
            )
        missing = [name for name in "xyz" if name not in held]
        system = group.attrs.get("extinction_system")
        if missing or not isinstance(system, str):
            lacks = missing or ["the attribute extinction_system"]
            raise ValueError(f"{self.path}: a map of dust must have {', '.join(lacks)}")
        axes = {name: np.asarray(self._array(name)[:], np.float64) for name in "xyz"}
        layout = Layout(
            grid_of_axes(axes, self.path),
            system_named(system),
            quantities,
            self._array("density_samples").shape[0] if Quantity.SAMPLES in quantities else 0,
            str(group.attrs.get("percentiles", "")).startswith("log-normal"),
        )
        for quantity in quantities:
            shape = self._array(DESCRIPTIONS[quantity].variable).shape
            if shape[-3:] != layout.shape:
                raise ValueError(
                    f"{self.path}: {DESCRIPTIONS[quantity].variable} must have shape (z, y, x) = "
                    f"{layout.shape}, got {shape}"
                )
        return layout

    def read(self, cube: Cube, box: Box) -> NDArray[np.float32]:
        array = self._array(DESCRIPTIONS[cube.quantity].variable)
        index = (cube.sample, *box) if cube.quantity is Quantity.SAMPLES else box
        try:
            return np.asarray(array[index], np.float32)
        except Exception as error:  # whatever a codec has to say of damaged bytes
            raise ValueError(
                f"{self.path}: {array.path} cannot be read ({error}); the file is damaged, make or "
                "download it again"
            ) from error

    @cached_property
    def _group(self) -> zarr.Group:
        try:
            return zarr.open_group(self.path, mode="r", use_consolidated=False)
        except (NodeNotFoundError, FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path}: expected a zarr group of version 2 or 3: {error}"
            ) from error

    def _array(self, name: str) -> zarr.Array[zarr.core.metadata.ArrayV3Metadata]:
        array = self._group[name]
        if not isinstance(array, zarr.Array):
            raise ValueError(f"{self.path}: {name} must be an array")
        return array
