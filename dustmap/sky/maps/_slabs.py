"""What the writers of cubes are given: a layout, and its planes in the order of z."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self, final

import numpy as np

from dustmap.gp import RegularGrid
from dustmap.sky.maps._cubes import AbstractCubes, Layout
from dustmap.sky.maps._field import (
    EVERY,
    AbstractDensityField,
    Planes,
    bytes_per_plane,
    slabs,
)
from dustmap.sky.maps._request import MapRequest, Quantity

SAMPLES = Quantity.SAMPLES
#: Bytes that the slabs of a writer take, unless told otherwise.
MEMORY = 3 * 2**30


class Walk(Protocol):
    """Gives a part of the planes, so many at a time, in the order of z."""

    def __call__(self, depth: int, part: slice = EVERY) -> Iterator[Planes]: ...


@final
@dataclass(frozen=True, eq=False)
class Slabs:
    """walk: gives the planes."""

    layout: Layout
    request: MapRequest
    walk: Walk

    @classmethod
    def of_field(cls, field: AbstractDensityField, grid: RegularGrid, request: MapRequest) -> Self:
        """What is requested of a field."""
        field.check(request)
        field.check_grid(grid)
        layout = Layout(grid, field.system, request.quantities, request.samples, field.positive)

        def walk(depth: int, part: slice = EVERY) -> Iterator[Planes]:
            return field.planes(grid, request, depth, part)

        return cls(layout, request, walk)

    @classmethod
    def of_cubes(cls, cubes: AbstractCubes) -> Self:
        """All that a map holds."""
        layout = cubes.layout
        request = MapRequest(layout.quantities, layout.samples)

        def walk(depth: int, part: slice = EVERY) -> Iterator[Planes]:
            return _planes(cubes, depth, part)

        return cls(layout, request, walk)

    def depth(self, memory: int, extra: int = 0) -> int:
        """Planes that fit into `memory` bytes beside `extra` more arrays, at least one."""
        return max(1, memory // bytes_per_plane(self.layout.grid, self.request, extra))


def _planes(cubes: AbstractCubes, depth: int, part: slice) -> Iterator[Planes]:
    layout = cubes.layout
    for start, stop in slabs(layout.grid.shape[2], depth, part):
        box = (slice(start, stop), slice(None), slice(None))
        read = {cube: cubes.read(cube, box) for cube in layout.cubes}
        arrays = {c.quantity.value: v for c, v in read.items() if c.quantity is not SAMPLES}
        if layout.samples:
            arrays[SAMPLES.value] = np.stack([v for c, v in read.items() if c.quantity is SAMPLES])
        yield Planes(start, stop, arrays)


def slab_memory(available: int) -> int:
    """Bytes for the slabs of a writer in a program that may take `available`."""
    return min(MEMORY, available // 2)
