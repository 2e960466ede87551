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
    """A and Aᵀ: from fields (w_0, …, w_J, r_0, …, r_{J−1}) at the widened nodes of their grids to s
    at the nodes of all,

        s_j = a_j + q_j,    a_j = P_j (a_{j−1} + f_j q_{j−1}) + g_j w_j,    q_j = g_j r_j,

    f_j = √(1 − g_j²), a_0 = w_0, q_0 = r_0, q_J = 0. f_j multiplies after interpolation.

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

    @property
    def boxes(self) -> tuple[RegularGrid, ...]:
        """The grid of every field."""
        return (*self.wide, *self.wide[:-1])

    def forward(self, fields: Sequence[Tensor]) -> Tensor:
        """A w (..., M)."""
        count = len(self.wide)
        a, q = fields[0], fields[count]
        found = [_cropped(a + q, self.nested.grids[0], self.wide[0])]
        for level in range(1, count):
            g = self.fades[level - 1]
            both = torch.stack([a, q])
            both = _along_axes(self.matrices[level - 1], both, self.wide[level - 1].shape)
            a = both[0] + _rest(g) * both[1] + g * fields[level]
            q = g * fields[count + level] if level + 1 < count else torch.zeros_like(a)
            found.append(_cropped(a + q, self.nested.grids[level], self.wide[level]))
        return torch.cat(found, dim=-1)

    def adjoint(self, x: Tensor) -> list[Tensor]:
        """Aᵀ x for x (..., M): what each field meets (..., M_j of the widened grid)."""
        count = len(self.wide)
        parts = zip(self.nested.places, self.nested.grids, self.wide, strict=True)
        seen = [_padded(x[..., place], grid, wide) for place, grid, wide in parts]
        of_a, of_q = [seen[-1]], list[Tensor]()
        for level in range(count - 1, 0, -1):
            both = torch.stack([of_a[0], _rest(self.fades[level - 1]) * of_a[0]])
            transposed = tuple(P.mT for P in self.matrices[level - 1])
            both = _along_axes(transposed, both, self.wide[level].shape)
            of_a.insert(0, seen[level - 1] + both[0])
            of_q.insert(0, seen[level - 1] + both[1])
        for level, g in enumerate(self.fades, start=1):
            of_a[level] = g * of_a[level]
            if level + 1 < count:
                of_q[level] = g * of_q[level]
        return [*of_a, *of_q]


def _rest(g: Tensor) -> Tensor:
    """√(1 − g²)."""
    return (1.0 - g.square()).clamp_min(0.0).sqrt()


@final
@dataclass(frozen=True, eq=False)
class NestedRoot(linalg.AbstractComposite):
    """R (M, Σ M_w) with R Rᵀ = K: s = A (R_0 ε_0, R_1 ε_1, …), a root of every field."""

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
    """K (M, M) = A diag(K_0, K_1, …) Aᵀ, a covariance of every field."""

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
