"""Roots and covariances of fields on nested grids, from those of each grid on its own torus."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.gp._grid import (
    NestedGrids,
    RegularGrid,
    fading,
    interpolation_matrices,
    widened_grids,
    within,
)
from dustmap.gp._lattice_prior import AbstractSlopes

#: Vectors whose fields are held at once.
_AT_ONCE = 4


@final
@dataclass(frozen=True, eq=False)
class Chain:
    """A and Aᵀ: from fields (w_0, …, w_J, r_0, …, r_{J−1}) at the widened nodes of their grids to s
    at the nodes of all,

        s_j = a_j + q_j,    a_j = P_j (a_{j−1} + f_j q_{j−1}) + g_j w_j,    q_j = g_j r_j,

    f_j = √(1 − g_j²), a_0 = w_0, q_0 = r_0, q_J = 0. f_j multiplies after interpolation.

    nested: the grids; wide: the same with the nodes that interpolation takes around them; links:
    P_j, from grid j − 1 to j; fades, rests: g_j and f_j (M_j), in the dtype of the fields.
    """

    nested: NestedGrids
    wide: tuple[RegularGrid, ...]
    links: tuple["Link", ...]
    fades: tuple[Tensor, ...]
    rests: tuple[Tensor, ...]

    @staticmethod
    def of(nested: NestedGrids, dtype: torch.dtype, device: torch.device | None = None) -> "Chain":
        """Make the matrices."""
        wide = widened_grids(nested)
        links = tuple(Link.of(*pair, dtype, device) for pair in itertools.pairwise(wide))
        fades = [
            fading(grid, before, around)
            for before, grid, around in zip(nested.grids, nested.grids[1:], wide[1:], strict=False)
        ]
        rests = [(1.0 - g.square()).clamp_min(0.0).sqrt() for g in fades]
        faded, kept = (tuple(g.to(device, dtype) for g in each) for each in (fades, rests))
        return Chain(nested, wide, links, faded, kept)

    @property
    def boxes(self) -> tuple[RegularGrid, ...]:
        """The grid of every field."""
        return (*self.wide, *self.wide[:-1])

    def forward(self, fields: Sequence[Tensor]) -> Tensor:
        """A w (..., M)."""
        count = len(self.wide)
        a, q = fields[0], fields[count]
        levels = [_cropped(a + q, self.nested.grids[0], self.wide[0])]
        for level, (link, g, f) in enumerate(self._steps, start=1):
            a = link.interpolated(a).addcmul_(f, link.interpolated(q)).addcmul_(g, fields[level])
            here = a
            if level + 1 < count:
                q = g * fields[count + level]
                here = a + q
            levels.append(_cropped(here, self.nested.grids[level], self.wide[level]))
        return torch.cat(levels, dim=-1)

    def adjoint(self, x: Tensor) -> list[Tensor]:
        """Aᵀ x for x (..., M): what each field meets (..., M_j of the widened grid)."""
        parts = zip(self.nested.places, self.nested.grids, self.wide, strict=True)
        seen = [_padded(x[..., place], grid, wide) for place, grid, wide in parts]
        of_a, of_q = [seen[-1]], list[Tensor]()
        for level, (link, _, f) in reversed(list(enumerate(self._steps))):
            of_q.insert(0, link.met(f * of_a[0]).add_(seen[level]))
            of_a.insert(0, link.met(of_a[0]).add_(seen[level]))
        for level, g in enumerate(self.fades, start=1):
            of_a[level] = g * of_a[level]
            if level < len(of_q):
                of_q[level] = g * of_q[level]
        return [*of_a, *of_q]

    @property
    def _steps(self) -> Iterator[tuple["Link", Tensor, Tensor]]:
        return zip(self.links, self.fades, self.rests, strict=True)


@final
@dataclass(frozen=True, eq=False)
class Link:
    """P = P_1 ⊗ … ⊗ P_D from the nodes of a grid to those of a finer one in it.

    matrices: P_d (m_d, K_d) of the K_d nodes `taken` of each axis of `source` that it takes.
    """

    source: tuple[int, ...]
    taken: tuple[slice, ...]
    matrices: tuple[Tensor, ...]

    @staticmethod
    def of(
        source: RegularGrid, target: RegularGrid, dtype: torch.dtype, device: torch.device | None
    ) -> "Link":
        """Leave out the columns of nothing but zeros."""
        taken, matrices = list[slice](), list[Tensor]()
        for matrix in interpolation_matrices(source, target):
            used = (matrix != 0.0).any(0).nonzero().squeeze(-1)
            columns = slice(int(used[0]), int(used[-1]) + 1)
            taken.append(columns)
            matrices.append(matrix[:, columns].to(device, dtype).contiguous())
        return Link(source.shape, tuple(taken), tuple(matrices))

    def interpolated(self, x: Tensor) -> Tensor:
        """P x (..., Π m) of x (..., Π M)."""
        at: tuple[Any, ...] = (..., *self.taken)
        block = x.reshape(*x.shape[:-1], *self.source)[at]
        return _along_axes(self.matrices, block, len(self.source))

    def met(self, y: Tensor) -> Tensor:
        """Pᵀ y (..., Π M) of y (..., Π m)."""
        fine = tuple(len(P) for P in self.matrices)
        block = y.reshape(*y.shape[:-1], *fine)
        spread = _along_axes(tuple(P.mT for P in self.matrices), block, len(fine))
        out = y.new_zeros((*y.shape[:-1], *self.source))
        at: tuple[Any, ...] = (..., *self.taken)
        out[at] = spread.reshape(out[at].shape)
        return out.reshape(*y.shape[:-1], math.prod(self.source))


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
        return _few_at_once(self._product, x, self.shape[0])

    def _product(self, x: Tensor) -> Tensor:
        parts = torch.split(x, [root.shape[1] for root in self.roots], dim=-1)
        fields = [root.matmul(part) for root, part in zip(self.roots, parts, strict=True)]
        return self.chain.forward(fields)

    def rmatmul(self, y: Tensor) -> Tensor:
        linalg.check_vectors("y", y, self.shape[0], self.dtype, self.device)
        return _few_at_once(self._adjoint, y, self.shape[1])

    def _adjoint(self, y: Tensor) -> Tensor:
        met = self.chain.adjoint(y)
        pulled = [root.rmatmul(part) for root, part in zip(self.roots, met, strict=True)]
        return torch.cat(pulled, dim=-1)


@final
@dataclass(frozen=True, eq=False)
class NestedCovariance(linalg.AbstractSymmetric):
    """K (M, M) = A diag(K_0, K_1, …) Aᵀ, a covariance of every field."""

    chain: Chain
    blocks: Sequence[linalg.AbstractOperator]

    @property
    def shape(self) -> tuple[int, int]:
        size = self.chain.nested.size
        return size, size

    def _made_of(self) -> linalg.AbstractOperator:
        return self.blocks[0]

    def matmul(self, x: Tensor) -> Tensor:
        linalg.check_vectors("x", x, self.shape[1], self.dtype, self.device)
        return _few_at_once(self._product, x, self.shape[0])

    def _product(self, x: Tensor) -> Tensor:
        met = self.chain.adjoint(x)
        return self.chain.forward([K.matmul(t) for K, t in zip(self.blocks, met, strict=True)])


@final
@dataclass(frozen=True, eq=False)
class NestedSlopes(AbstractSlopes):
    """∂K/∂θ_q = A diag(∂C_j/∂θ_q) Aᵀ; circulants: ∂C_j/∂θ_q of every q and field j."""

    chain: Chain
    circulants: tuple[tuple[linalg.CirculantOperator, ...], ...]

    def products(self, x: Tensor) -> Tensor:
        return torch.stack([NestedCovariance(self.chain, C).matmul(x) for C in self.circulants])

    def quadratic(self, x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for seen, *blocks in zip(self.chain.adjoint(x), *self.circulants, strict=True):
            total = total + linalg.quadratic_forms(blocks, seen)
        return total


def _few_at_once(product: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    """A product (..., width) with vectors x (..., n), of which a few are divided into fields."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) == 0:
        return x.new_zeros(*x.shape[:-1], width)
    if len(rows) <= _AT_ONCE:
        return product(x)
    out = x.new_empty(len(rows), width)
    for part in linalg.chunks(len(rows), _AT_ONCE):
        out[part] = product(rows[part])
    return out.reshape(*x.shape[:-1], width)


def _along_axes(matrices: Sequence[Tensor], x: Tensor, dim: int) -> Tensor:
    """(P_1 ⊗ … ⊗ P_D) x (..., Π m) of x (..., M_1, …, M_D), one product of matrices an axis.

    Each takes the last axis and leaves the new one first, so that after D of them all are in place.
    """
    lead = x.shape[:-dim]
    vectors = []
    for vector in x.reshape(-1, *x.shape[-dim:]):
        for matrix in reversed(matrices):
            vector = matrix @ vector.reshape(-1, matrix.shape[1]).mT
        vectors.append(vector.reshape(-1))
    products = torch.stack(vectors) if vectors else x.new_zeros(0, math.prod(map(len, matrices)))
    return products.reshape(*lead, products.shape[-1])


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
