"""Points against which covariances are evaluated, kept per axis so that grids stay small."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp._grid import RegularGrid

Box = tuple[slice, ...]


@final
@dataclass(frozen=True, eq=False)
class Nodes:
    """A tensor product of axes, or a plain list of points.

    axes: D float64 tensors that broadcast to (1, *shape): (1, .., M_d, .., 1) of a grid, whose
    axes ascend, or (1, M) each of a list; direction: like `axes` of a list, the direction of the
    derivative taken at every node, or None for values.
    """

    axes: tuple[Tensor, ...]
    shape: tuple[int, ...]
    is_product: bool
    direction: tuple[Tensor, ...] | None = None

    @staticmethod
    def of_axes(axes: Sequence[Tensor]) -> "Nodes":
        """The tensor product of ascending 1-D axes."""
        dim = len(axes)
        shaped = (a.reshape(1, *_shape_of_axis(d, dim, len(a))) for d, a in enumerate(axes))
        return Nodes(tuple(shaped), tuple(len(a) for a in axes), is_product=True)

    @staticmethod
    def of_grid(grid: RegularGrid, device: torch.device) -> "Nodes":
        """The nodes of a grid."""
        return Nodes.of_axes(grid.axes(device))

    @staticmethod
    def of_points(points: Tensor, direction: Tensor | None = None) -> "Nodes":
        """Points (M, D), with a derivative direction (M, D) or none."""
        turned = None if direction is None else tuple(direction.T[:, None])
        return Nodes(tuple(points.T[:, None]), (len(points),), False, turned)

    @property
    def dim(self) -> int:
        """Input dimension D."""
        return len(self.axes)

    @property
    def size(self) -> int:
        """Number of nodes M."""
        return math.prod(self.shape)

    def bounds(self) -> list[tuple[float, float]]:
        """Lowest and highest coordinate per axis."""
        return [(float(a.min()), float(a.max())) for a in self.axes]

    def column(self, values: Tensor) -> Tensor:
        """values (n,) shaped to broadcast against (n, *shape)."""
        return values.reshape(-1, *([1] * len(self.shape)))

    def displacement(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """x_d - z_d per axis for points x (n, D), subtracted in float64 and cast afterwards.

        The cast keeps the relative accuracy of every displacement whatever the number of nodes;
        coordinates cast before the subtraction lose it on fine grids.
        """
        return tuple((self.column(x[:, d]) - a).to(dtype) for d, a in enumerate(self.axes))

    def within(self, low: Sequence[float], high: Sequence[float]) -> Box | None:
        """Sub-box of a product (or all of a list) that meets the box [low, high], if any does."""
        if self.is_product:
            box = [_slab(axis, a, b) for axis, a, b in zip(self.axes, low, high, strict=True)]
            return None if any(s.stop <= s.start for s in box) else tuple(box)
        for (first, last), a, b in zip(self.bounds(), low, high, strict=True):
            if last < a or first > b:
                return None
        return tuple(slice(0, m) for m in self.shape)

    def part(self, box: Box) -> "Nodes":
        """The nodes of a sub-box."""
        if self.is_product:
            return Nodes.of_axes([a.flatten()[s] for a, s in zip(self.axes, box, strict=True)])
        rows = box[0]
        direction = self.direction and tuple(v[:, rows] for v in self.direction)
        return Nodes(tuple(a[:, rows] for a in self.axes), (_length(rows),), False, direction)


def pieces(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box along its first axis into parts of at most `limit` nodes, or of one layer."""
    layer = math.prod(_length(s) for s in box[1:])
    step = max(1, limit // max(1, layer))
    for start in range(box[0].start, box[0].stop, step):
        yield (slice(start, min(start + step, box[0].stop)), *box[1:])


def _length(s: slice) -> int:
    return int(s.stop) - int(s.start)


def _shape_of_axis(axis: int, dim: int, length: int) -> tuple[int, ...]:
    return tuple(length if d == axis else 1 for d in range(dim))


def _slab(axis: Tensor, low: float, high: float) -> slice:
    flat = axis.flatten()
    ends = torch.tensor([low, high], dtype=flat.dtype, device=flat.device)
    start = int(torch.searchsorted(flat, ends[0], right=False))
    return slice(start, int(torch.searchsorted(flat, ends[1], right=True)))
