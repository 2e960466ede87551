"""Multilinear interpolation from one regular grid to another, an axis at a time."""

from typing import final

import torch
from torch import Tensor

from dustmap.gp._grid import RegularGrid


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
        self.identity = torch.equal(where, torch.arange(nodes, dtype=where.dtype))

    def along(self, values: Tensor, dim: int) -> Tensor:
        """Interpolate along the last axis (dim = −1) of values, or the one before (dim = −2)."""
        if self.identity:
            return values
        left = values.index_select(dim, self.cell)
        right = values.index_select(dim, self.cell + 1)
        return left.lerp_(right, self.weight if dim == -1 else self.weight[:, None])


def resized(values: Tensor, source: RegularGrid, target: RegularGrid) -> Tensor:
    """Values (M,) at the nodes of a grid, multilinear at those of another in its box.

    Examples
    --------
    >>> source, target = RegularGrid((0.0,), (2.0,), (3,)), RegularGrid((1.0,), (1.0,), (3,))
    >>> resized(torch.tensor([0.0, 2.0, 0.0]), source, target)
    tensor([1., 2., 1.])
    """
    block = values.reshape(source.shape)
    for axis in range(source.dim):
        weights = AxisWeights(source, target, axis, values.dtype)
        block = weights.along(block.movedim(axis, -1), -1).movedim(-1, axis)
    return block.flatten()
