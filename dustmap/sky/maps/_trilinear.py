"""Trilinear interpolation in a map's cubes, whether they are in memory or in a file."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import RegularGrid
from dustmap.sky.maps._cubes import AbstractCubes, Box, Cube

#: Places interpolated at once: index and weights of more would leave the cache.
_CHUNK = 65_536
#: Voxels per axis of the blocks that are read for a few places.
_BLOCK = 64
#: A cube is read whole where blocks would be more than this part of it.
_PART = 0.25


@final
@dataclass(frozen=True, eq=False)
class Cells:
    """N places within the box of voxel centres.

    cell (N, 3) int64: lower corners in x, y, z; offset (N, 3): from there, in [0, 1].
    """

    cell: Tensor
    offset: Tensor

    @classmethod
    def of(cls, grid: RegularGrid, positions: Tensor) -> Self:
        """Of places X, Y, Z (N, 3) in pc; what is beyond a face counts as on it."""
        lower, spacing, shape = (
            torch.tensor(values, dtype=torch.float64)
            for values in (grid.lower, grid.spacing, grid.shape)
        )
        where = torch.minimum(((positions - lower) / spacing).clamp_min_(0.0), shape - 1.0)
        cell = torch.minimum(where.floor(), shape - 2.0)
        return cls(cell.to(torch.int64), (where - cell).to(torch.float32))

    def __len__(self) -> int:
        return len(self.cell)

    def part(self, index: slice | Tensor) -> "Cells":
        """Some of the places."""
        return Cells(self.cell[index], self.offset[index])

    @property
    def weights(self) -> Tensor:
        """Of the 8 corners (N, 8), x the fastest."""
        x, y, z = (torch.stack([1.0 - t, t], dim=-1) for t in self.offset.unbind(-1))
        return (z[:, :, None, None] * y[:, None, :, None] * x[:, None, None, :]).flatten(1)


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
        corner = (cells.cell[:, 0] * y + cells.cell[:, 1]) * z + cells.cell[:, 2]
        x_share, y_share, z_share = cells.offset.to(self.values.dtype)[..., None].unbind(1)

        def along_z(shift: int) -> Tensor:
            low = self.values.index_select(0, corner + shift)
            return low.lerp_(self.values.index_select(0, corner + shift + 1), z_share)

        def along_y(shift: int) -> Tensor:
            return along_z(shift).lerp_(along_z(shift + z), y_share)

        return along_y(0).lerp_(along_y(y * z), x_share)


#: What is made of a cube (z, y, x) at places.
Take: TypeAlias = Callable[[Tensor, Cells], Tensor]


@final
class CubeReader:
    """Interpolates in the cubes of a map. Few places read the blocks they lie in; many read the
    whole cube, which is kept while `memory` bytes hold it."""

    def __init__(self, cubes: AbstractCubes, memory: int) -> None:
        self.cubes = cubes
        self._memory = memory
        self._kept: OrderedDict[Cube, Tensor] = OrderedDict()

    def whole(self, cube: Cube) -> Tensor:
        """All voxels (z, y, x)."""
        if cube in self._kept:
            self._kept.move_to_end(cube)
            return self._kept[cube]
        values = self._read(cube, (slice(None), slice(None), slice(None)))
        size = 4 * values.numel()
        while self._kept and (len(self._kept) + 1) * size > self._memory:
            self._kept.popitem(last=False)
        # Even one that is larger than `memory` is worth keeping: the next question is likely of it.
        self._kept[cube] = values
        return values

    def at(self, cube: Cube, cells: Cells) -> Tensor:
        """Values (N,) at places, float32."""
        return self._read_at(cube, cells, trilinear, ())

    def corners(self, cube: Cube, cells: Cells) -> Tensor:
        """Values (N, 8) at the corners of the cells, of `Cells.weights`, float32."""
        return self._read_at(cube, cells, corners, (8,))

    def _read_at(self, cube: Cube, cells: Cells, take: Take, shape: tuple[int, ...]) -> Tensor:
        if cube in self._kept:
            return _in_chunks(self.whole(cube), cells, take)
        blocks, block_of = self._blocks(cells)
        needed = len(blocks) * (_BLOCK + 1) ** 3
        if needed > _PART * np.prod(self.cubes.layout.shape):
            return _in_chunks(self.whole(cube), cells, take)
        values = torch.empty(len(cells), *shape, dtype=torch.float32)
        for i, block in enumerate(blocks):
            mine = (block_of == i).nonzero()[:, 0]
            start = block * _BLOCK
            box = tuple(slice(int(k), int(k) + _BLOCK + 1) for k in start.flip(0))
            here = Cells(cells.cell[mine] - start, cells.offset[mine])
            values[mine] = _in_chunks(self._read(cube, (box[0], box[1], box[2])), here, take)
        return values

    def _blocks(self, cells: Cells) -> tuple[Tensor, Tensor]:
        """Blocks (B, 3) in x, y, z that hold the places, and of which each place is (N,)."""
        of_place = torch.div(cells.cell, _BLOCK, rounding_mode="floor")
        counts = [n // _BLOCK + 1 for n in self.cubes.layout.grid.shape]
        flat = (of_place[:, 0] * counts[1] + of_place[:, 1]) * counts[2] + of_place[:, 2]
        unique, inverse = torch.unique(flat, return_inverse=True)
        yz = counts[1] * counts[2]
        blocks = [unique // yz, unique % yz // counts[2], unique % counts[2]]
        return torch.stack(blocks, dim=-1), inverse

    def _read(self, cube: Cube, box: Box) -> Tensor:
        values = np.ascontiguousarray(self.cubes.read(cube, box), np.float32)
        return torch.from_numpy(values if values.flags.writeable else values.copy())


def _in_chunks(values: Tensor, cells: Cells, take: Take) -> Tensor:
    if len(cells) <= _CHUNK:
        return take(values, cells)
    starts = range(0, len(cells), _CHUNK)
    return torch.cat([take(values, cells.part(slice(i, i + _CHUNK))) for i in starts])


def trilinear(values: Tensor, cells: Cells) -> Tensor:
    """Σ over the 8 corners of a cell, values (z, y, x) contiguous: (N,).

    Neighbours in x are neighbours in memory: four gathers of pairs instead of eight of numbers.
    """
    _, y, x = values.shape
    corner = (cells.cell[:, 2] * y + cells.cell[:, 1]) * x + cells.cell[:, 0]
    pairs = values.as_strided((values.numel() - 1, 2), (1, 1))
    along_x = torch.stack([1.0 - cells.offset[:, 0], cells.offset[:, 0]], dim=-1)

    def row(shift: int) -> Tensor:
        return pairs.index_select(0, corner + shift).mul_(along_x).sum(-1)

    along_y, along_z = cells.offset[:, 1], cells.offset[:, 2]
    below = row(0).lerp_(row(x), along_y)
    above = row(x * y).lerp_(row(x * y + x), along_y)
    return below.lerp_(above, along_z)


def corners(values: Tensor, cells: Cells) -> Tensor:
    """Values (z, y, x) at the 8 corners of cells, (N, 8), x the fastest."""
    _, y, x = values.shape
    corner = (cells.cell[:, 2] * y + cells.cell[:, 1]) * x + cells.cell[:, 0]
    shifts = torch.tensor([(k * y + j) * x + i for k in (0, 1) for j in (0, 1) for i in (0, 1)])
    return values.flatten()[corner[:, None] + shifts]
