"""Multilinear interpolation from one regular grid to another, an axis at a time."""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from dustmap.gp import RegularGrid


@final
class AxisWeights:
    """out_i = (1 − w_i) in_{c_i} + w_i in_{c_i + 1} along one axis, w in [0, 1].

    cell (n,) int64, weight (n,) in `dtype`; points within 1e-6 of a cell of an end count as there.
    """

    def __init__(self, source: RegularGrid, target: RegularGrid, axis: int, dtype: torch.dtype):
        nodes = source.shape[axis]
        where = (target.axes()[axis] - source.lower[axis]) / source.spacing[axis]
        # A point that is a node but for round-off takes the node's value, bit for bit.
        nearest = where.round()
        where = torch.where((where - nearest).abs() < 1e-6, nearest, where).clamp(0.0, nodes - 1.0)
        self.cell = where.floor().to(torch.int64).clamp_max(nodes - 2)
        self.weight = (where - self.cell).to(dtype)
        self.identity = nodes == len(where) and bool(
            (where == torch.arange(nodes, dtype=where.dtype)).all()
        )

    def along_last(self, values: Tensor) -> Tensor:
        """(..., nodes) to (..., n)."""
        if self.identity:
            return values
        left = values.index_select(-1, self.cell)
        right = values.index_select(-1, self.cell + 1)
        return left.lerp_(right, self.weight)

    def along_rows(self, values: Tensor) -> Tensor:
        """(..., nodes, m) to (..., n, m)."""
        if self.identity:
            return values
        left = values.index_select(-2, self.cell)
        right = values.index_select(-2, self.cell + 1)
        return left.lerp_(right, self.weight[:, None])


@final
class Resampler:
    """From fields at the nodes of `source` (S, x, y, z) to planes (S, y, x) at those of `target`.

    Every plane of nodes is widened in x and y once, and kept while planes of the target lie next
    to it: two widened planes are all the memory that is taken.
    """

    def __init__(self, source: RegularGrid, target: RegularGrid, dtype: torch.dtype) -> None:
        x, y, z = (AxisWeights(source, target, axis, dtype) for axis in range(3))
        self._x, self._y, self._z = x, y, z

    def planes(self, fields: Tensor, part: slice) -> Iterator[tuple[Tensor, Tensor, float]]:
        """(below, above, weight) of planes in z: their values are lerp(below, above, weight)."""
        wide: dict[int, Tensor] = {}
        cells, weights = self._z.cell[part].tolist(), self._z.weight[part].tolist()
        for cell, weight in zip(cells, weights, strict=True):
            wide = {k: plane for k, plane in wide.items() if k in (cell, cell + 1)}
            for k in (cell, cell + 1):
                if k not in wide:
                    wide[k] = self._widened(fields[..., k])
            yield wide[cell], wide[cell + 1], weight

    def _widened(self, plane: Tensor) -> Tensor:
        """(S, x, y) at nodes to (S, y, x) of the target."""
        return self._x.along_last(self._y.along_rows(plane.transpose(-1, -2).contiguous()))
