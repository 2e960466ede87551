"""Cubes of a map.zarr."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray

from dustmap.sky._zarr import array_names, checked_array, open_checked, read_array
from dustmap.sky.maps._cubes import DESCRIPTIONS, AbstractCubes, Box, Cube, Layout, layout_of
from dustmap.sky.maps._quantities import Quantity


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
        held = array_names(self.path)
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
        samples, shapes = 0, {q: self._array(DESCRIPTIONS[q].variable).shape for q in quantities}
        if Quantity.SAMPLES in shapes:
            samples, *rest = shapes[Quantity.SAMPLES] or (0,)
            shapes[Quantity.SAMPLES] = tuple(rest)
        axes = {name: self._axis(name) for name in "xyz"}
        percentiles = group.attrs.get("percentiles", "")
        return layout_of(self.path, shapes, samples, axes, system, percentiles)

    def read(self, cube: Cube, box: Box) -> NDArray[np.float32]:
        array = self._array(DESCRIPTIONS[cube.quantity].variable)
        index = (cube.sample, *box) if cube.quantity is Quantity.SAMPLES else box
        return read_array(array, self.path, index).astype(np.float32, copy=False)

    def _axis(self, name: str) -> NDArray[np.float64]:
        return read_array(self._array(name), self.path, ...).astype(np.float64, copy=False)

    @cached_property
    def _group(self) -> zarr.Group:
        return open_checked(self.path, "a zarr group of version 2 or 3")

    @cached_property
    def _arrays(self) -> "dict[str, zarr.Array[Any]]":
        """Each is checked when it is first asked for."""
        return {}

    def _array(self, name: str) -> "zarr.Array[Any]":
        if name not in self._arrays:
            self._arrays[name] = checked_array(self._group, self.path, name)
        return self._arrays[name]
