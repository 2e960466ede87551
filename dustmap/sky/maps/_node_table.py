"""Trilinear interpolation in many fields at once, as samples are."""

from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from dustmap.gp import RegularGrid
from dustmap.sky.maps._trilinear import Cells


@final
@dataclass(frozen=True, eq=False)
class NodeTable:
    """Many fields on one grid, together at every node: values (M, S), nodes in the C order of
    (x, y, z)."""

    grid: RegularGrid
    values: Tensor

    @classmethod
    def of(cls, grid: RegularGrid, fields: Tensor) -> Self:
        """From fields (S, M)."""
        return cls(grid, fields.mT.contiguous())

    def at(self, cells: Cells) -> Tensor:
        """All fields (N, S) at places."""
        _, y, z = self.grid.shape
        corner = torch.from_numpy((cells.cell[:, 0] * y + cells.cell[:, 1]) * z + cells.cell[:, 2])
        offset = torch.from_numpy(cells.offset).to(self.values.dtype)
        x_share, y_share, z_share = offset[..., None].unbind(1)

        def along_z(shift: int) -> Tensor:
            low = self.values.index_select(0, corner + shift)
            return low.lerp_(self.values.index_select(0, corner + shift + 1), z_share)

        def along_y(shift: int) -> Tensor:
            return along_z(shift).lerp_(along_z(shift + z), y_share)

        return along_y(0).lerp_(along_y(y * z), x_share)
