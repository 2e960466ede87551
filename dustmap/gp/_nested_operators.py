"""Roots and covariances of fields on nested grids, from those of each grid on its own torus."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.gp._grid import RegularGrid
from dustmap.gp._lattice_prior import AbstractSlopes
from dustmap.gp._levels import (
    NestedGrids,
    fading,
    interpolation_matrices,
    widened_grids,
    within,
)


@final
@dataclass(frozen=True, eq=False)
class Chain:
    """A and Aᵀ: from fields (w_0, …, w_J) at the widened nodes of every grid, one after the other,
    to s at the nodes of all; s_j = P_j s_{j−1} + g_j w_j.

    nested: the grids; wide: the same with the nodes that interpolation takes around them; matrices:
    P_j of every axis, from grid j − 1 to j; fades: g_j (M_j), in the dtype of the fields.
    """

    nested: NestedGrids
    wide: tuple[RegularGrid, ...]
    matrices: tuple[tuple[Tensor, ...], ...]
    fades: tuple[Tensor, ...]

    @staticmethod
    def of(nested: NestedGrids, dtype: torch.dtype, device: torch.device | None = None) -> "Chain":
        """Make the matrices."""
        wide = widened_grids(nested)
        matrices = tuple(
            tuple(each.to(device, dtype) for each in interpolation_matrices(source, target))
            for source, target in itertools.pairwise(wide)
        )
        fades = [
            _padded(fading(grid, before.spacing), grid, around)
            for before, grid, around in zip(nested.grids, nested.grids[1:], wide[1:], strict=False)
        ]
        return Chain(nested, wide, matrices, tuple(each.to(device, dtype) for each in fades))

    def forward(self, fields: Sequence[Tensor]) -> Tensor:
        """A w (..., M)."""
        found, here = list[Tensor](), fields[0]
        for number, grid in enumerate(self.nested.grids):
            if number > 0:
                here = _along_axes(self.matrices[number - 1], here, self.wide[number - 1].shape)
                here = here + self.fades[number - 1] * fields[number]
            found.append(_cropped(here, grid, self.wide[number]))
        return torch.cat(found, dim=-1)

    def adjoint(self, x: Tensor) -> list[Tensor]:
        """Aᵀ x for x (..., M): what each field meets (..., M_j of the widened grid)."""
        found, there = list[Tensor](), None
        for number in reversed(range(len(self.nested.grids))):
            grid, wide = self.nested.grids[number], self.wide[number]
            here = _padded(x[..., self.nested.places[number]], grid, wide)
            if there is not None:
                transposed = tuple(P.mT for P in self.matrices[number])
                here = here + _along_axes(transposed, there, self.wide[number + 1].shape)
            found.append(here if number == 0 else self.fades[number - 1] * here)
            there = here
        return found[::-1]

    def shares(self) -> list[Tensor]:
        """The factor (M,) that the field of each grid has at the nodes of all, in float64: 0 where
        it is not seen, 1 in the middle of its box."""
        found = []
        for which in range(len(self.wide)):
            ones = [
                torch.full((grid.size,), float(number == which), dtype=self.fades[0].dtype)
                for number, grid in enumerate(self.wide)
            ]
            found.append(self.forward([each.to(self.fades[0].device) for each in ones]).double())
        return found


@final
@dataclass(frozen=True, eq=False)
class NestedRoot(linalg.AbstractComposite):
    """R (M, Σ_j M_wj) with R Rᵀ = K: s = A (R_0 ε_0, …, R_J ε_J)."""

    chain: Chain
    roots: tuple[linalg.CirculantOperator, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.chain.nested.size, sum(root.shape[1] for root in self.roots)

    def _made_of(self) -> linalg.AbstractOperator:
        return self.roots[0]

    def matmul(self, x: Tensor) -> Tensor:
        linalg.check_vectors("x", x, self.shape[1], self.dtype, self.device)
        parts = torch.split(x, [root.shape[1] for root in self.roots], dim=-1)
        fields = [root.matmul(part) for root, part in zip(self.roots, parts, strict=True)]
        return self.chain.forward(fields)

    def rmatmul(self, y: Tensor) -> Tensor:
        linalg.check_vectors("y", y, self.shape[0], self.dtype, self.device)
        met = self.chain.adjoint(y)
        pulled = [root.rmatmul(part) for root, part in zip(self.roots, met, strict=True)]
        return torch.cat(pulled, dim=-1)


@final
@dataclass(frozen=True, eq=False)
class NestedCovariance(linalg.AbstractSymmetric):
    """K (M, M) = A diag(K_0, …, K_J) Aᵀ."""

    chain: Chain
    blocks: tuple[linalg.AbstractOperator, ...]

    @property
    def circulants(self) -> tuple[linalg.CirculantOperator, ...]:
        """The blocks, where all are circulants."""
        found = tuple(each for each in self.blocks if isinstance(each, linalg.CirculantOperator))
        assert len(found) == len(self.blocks)
        return found

    @property
    def shape(self) -> tuple[int, int]:
        size = self.chain.nested.size
        return size, size

    def _made_of(self) -> linalg.AbstractOperator:
        return self.blocks[0]

    def matmul(self, x: Tensor) -> Tensor:
        linalg.check_vectors("x", x, self.shape[1], self.dtype, self.device)
        met = self.chain.adjoint(x)
        return self.chain.forward([K.matmul(t) for K, t in zip(self.blocks, met, strict=True)])


@final
@dataclass(frozen=True, eq=False)
class NestedSlopes(AbstractSlopes):
    """∂K/∂θ_q = A diag(∂C_j/∂θ_q) Aᵀ, whose blocks are circulants."""

    covariances: tuple[NestedCovariance, ...]

    def products(self, x: Tensor) -> Tensor:
        return torch.stack([slope.matmul(x) for slope in self.covariances])

    def quadratic(self, x: Tensor) -> Tensor:
        met = self.covariances[0].chain.adjoint(x)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for number, seen in enumerate(met):
            blocks = [covariance.circulants[number] for covariance in self.covariances]
            total = total + linalg.quadratic_forms(blocks, seen)
        return total


def _along_axes(matrices: Sequence[Tensor], x: Tensor, box: Sequence[int]) -> Tensor:
    """(P_1 ⊗ … ⊗ P_D) x (..., Π m) of x (..., Π M) on a box of M nodes."""
    lead, block = x.shape[:-1], x.reshape(-1, *box)
    for axis, matrix in enumerate(matrices):
        block = torch.movedim(block, axis + 1, -1) @ matrix.mT
        block = torch.movedim(block, -1, axis + 1)
    return block.reshape(*lead, -1)


def _cropped(x: Tensor, grid: RegularGrid, wide: RegularGrid) -> Tensor:
    """The nodes of a grid (..., M), of those around it (..., M_wide)."""
    if grid.shape == wide.shape:
        return x
    at: tuple[Any, ...] = (..., *within(grid, wide))
    block = x.reshape(*x.shape[:-1], *wide.shape)[at]
    return block.reshape(*x.shape[:-1], grid.size)


def _padded(x: Tensor, grid: RegularGrid, wide: RegularGrid) -> Tensor:
    """The adjoint: 0 at the nodes around the grid."""
    if grid.shape == wide.shape:
        return x
    block = x.new_zeros((*x.shape[:-1], *wide.shape))
    at: tuple[Any, ...] = (..., *within(grid, wide))
    block[at] = x.reshape(*x.shape[:-1], *grid.shape)
    return block.reshape(*x.shape[:-1], wide.size)
