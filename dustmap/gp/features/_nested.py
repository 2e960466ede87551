"""Features of a Gaussian field on nested grids: kriging weights on the nodes of one of them.

A place or a part of a ray belongs to the finest grid around it. There the nodes have the field's
own covariance (`NestedPrior`), so that weights and what they leave are those of a grid of its own.

How many nodes per axis stencils take, by the variance that they leave and by their bytes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import functionals
from dustmap.gp._grid import NestedGrids, RegularGrid
from dustmap.gp._nested_prior import NestedPrior
from dustmap.gp.features import _local_weights
from dustmap.gp.features._base import (
    AbstractFeatureMap,
    AbstractGridFeatures,
    AbstractPriorFeatures,
    Features,
)
from dustmap.gp.features._interpolation import box_nodes, refuse_beyond
from dustmap.gp.features._levels_of_rays import LevelPart, level_parts, nested_taps
from dustmap.gp.features._local import CellWeights, LocalFeatures
from dustmap.gp.features._local_weights import CellResiduals, Piece, Taps
from dustmap.gp.features._operators import ProductOperator
from dustmap.gp.features._residuals import ResidualVariance, banded_variance
from dustmap.gp.features._stencil import ORDERS, ResidualTable, Stencil, point_variance
from dustmap.gp.kernels import AbstractKernel
from dustmap.linalg import AbstractOperator

#: Derivatives of a profile from which on nodes nearby say all of each other, and the part of the
#: variance that weights then take for noise of the nodes.
_SMOOTH, _NUGGET = 100, 1e-6
#: Bits of a seed that are those of the run: above them is the number of a grid.
_SEED_BITS = 40


@final
@dataclass(frozen=True, eq=False)
class NodeFeatures(AbstractFeatureMap):
    """Φ = W, of the field u (M,) at the nodes of nested grids in the place of white variables.

    For posteriors whose mean and draws are known at the nodes: their products need no transforms.

    kernel: of the field; nested: the nodes; order: nodes per axis of a stencil, 2 or 4, in the
    outermost cells of every grid 2; memory: bytes that W and its transpose may take, beyond which
    rows are recomputed in every product.
    """

    parts = ("kernel",)
    prefers_products = True

    kernel: AbstractKernel
    nested: NestedGrids
    rows_dtype: torch.dtype = torch.float32
    order: int = 4
    memory: int = 2**31

    @property
    def n_features(self) -> int:
        """M."""
        return self.nested.size

    @property
    def dtype(self) -> torch.dtype:
        return self.rows_dtype

    def rows(self, functional: functionals.AbstractFunctional) -> Features:
        refuse_beyond(functional, self.nested)
        W = torch.zeros(len(functional), self.n_features, dtype=self.dtype)
        W = W.to(functional.device)
        for part, cells in self._parts(functional):
            own = cells.piece(part.functional).dense(part.grid.size, self.dtype)
            columns = torch.arange(part.first, part.first + part.grid.size, device=W.device)
            own = own.new_zeros(len(own), self.n_features).index_add(1, columns, own)
            W = W.index_add(0, part.rows, own)
        left = self._residuals(functional)
        return Features(W, left.value, clamped=left.clamped)

    @torch.no_grad()
    def operator(self, functional: functionals.AbstractFunctional) -> AbstractOperator:
        return functionals.operator_by_rows(functional, self._weights)

    def _weights(self, functional: functionals.AbstractFunctional) -> AbstractOperator:
        """W (N, M), stored where it fits the memory."""
        refuse_beyond(functional, self.nested)
        return _local_weights.stored_within(self.memory, self.taps, functional, self.n_features)

    def plan_bytes(self, functional: functionals.AbstractFunctional) -> int:
        """Bytes of W and its transpose: the most of any rank."""
        if isinstance(functional, functionals.Sharded):
            own = torch.tensor([self.plan_bytes(functional.local)])
            return int(functional.world.gathered(own).max())
        taps = self.taps(functional[_local_weights.spread_rows(functional)])
        return _local_weights.planned_bytes(taps, (len(functional), self.n_features))

    @torch.no_grad()
    def taps(self, functional: functionals.AbstractFunctional) -> Taps:
        """The rows of W of few data, as they are made."""

        def taps_of(part: LevelPart) -> Taps:
            piece = self._kept_cells[self._key(part)].piece(part.functional)
            return piece.sites(slice(0, piece.count)).taps(piece.table.to(self.dtype))

        return nested_taps(functional, self.nested, taps_of, self.dtype, self.order)

    def products(self, functional: functionals.AbstractFunctional, eps: Tensor) -> Tensor:
        refuse_beyond(functional, self.nested)
        seen = eps.new_zeros(len(eps), len(functional))
        for part, cells in self._parts(functional):
            own = eps[:, part.first : part.first + part.grid.size]
            seen = seen.index_add(1, part.rows, cells.piece(part.functional).product(own))
        return seen

    def residual_variance(self, functional: functionals.AbstractFunctional) -> Tensor:
        return functionals.by_rows(functional, lambda own: self._residuals(own).value)

    def _residuals(self, functional: functionals.AbstractFunctional) -> ResidualVariance:
        """Sum the residual variances of parts of rays on different grids as independent."""
        total = torch.zeros(len(functional), dtype=torch.float64, device=functional.device)
        for part, variance in self.residuals_of_parts(functional):
            total = total.index_add(0, part.rows, variance)
        prior = float(self.kernel.variance().detach())
        return ResidualVariance.of(total, self.dtype, prior)

    def residuals_of_parts(
        self, functional: functionals.AbstractFunctional
    ) -> Iterator[tuple[LevelPart, Tensor]]:
        """Every part of the data on one grid, and what this leaves of it, but for round-off."""
        for part, cells in self._parts(functional):
            yield part, cells.residual(part.functional)

    def _parts(
        self, functional: functionals.AbstractFunctional
    ) -> Iterator[tuple[LevelPart, "_LevelWeights"]]:
        """Parts of the data with their weights, whose tables are made once for all: for one product
        where they have a graph of the kernel."""
        cells = self._kept_cells
        if any(each.cells.stencil.has_graph for each in cells.values()):
            cells = self._cells()
        for part in level_parts(functional, self.nested, self.order):
            yield part, cells[self._key(part)]

    def _key(self, part: LevelPart) -> tuple[int, int]:
        """The number of the grid and the order."""
        return self.nested.grids.index(part.grid), part.order

    @cached_property
    def _kept_cells(self) -> Mapping[tuple[int, int], "_LevelWeights"]:
        return self._cells()

    def _cells(self) -> Mapping[tuple[int, int], "_LevelWeights"]:
        """Weights by the number of the grid and the order."""
        smooth = any(term.profile.derivatives > _SMOOTH for term in self.kernel.terms())
        nugget = _NUGGET * self.kernel.variance().detach() if smooth else None
        return {
            (number, order): _LevelWeights(CellWeights(stencil, grid, grid.shape, mirrors=True))
            for number, grid in enumerate(self.nested.grids)
            for order in {2, self.order}
            for stencil in [Stencil(self.kernel, grid.spacing, order, nugget=nugget)]
        }


@final
@dataclass(frozen=True, eq=False)
class NestedFeatures(AbstractPriorFeatures):
    """Φ = W R: the field at the nodes of nested grids, u = R ε, and kriging weights.

    What the grid of a place leaves, Var r, is the larger the coarser that is: it is all that a
    place lacks of finer ones.

    prior: u; order, memory: as of `NodeFeatures`.

    Examples
    --------
    >>> from dustmap.gp.functionals import PointValues
    >>> from dustmap.gp.kernels import Matern32
    >>> far = RegularGrid.from_bounds((-8.0,), (8.0,), (17,))
    >>> near = RegularGrid.from_bounds((-4.0,), (4.0,), (33,))
    >>> prior = NestedPrior.of(Matern32(3.0, dim=1), NestedGrids((far, near)))
    >>> places = PointValues(torch.tensor([[6.5], [0.125]], dtype=torch.float64))
    >>> NestedFeatures(prior).residual_variance(places)
    tensor([0.0082, 0.0001], dtype=torch.float64)
    """

    prefers_products = True

    prior: NestedPrior
    order: int = 4
    memory: int = 2**31

    @cached_property
    def at_nodes(self) -> NodeFeatures:
        """W, for fields that are known at the nodes."""
        prior = self.prior
        return NodeFeatures(prior.kernel, prior.grid, prior.dtype, self.order, self.memory)

    def rows(self, functional: functionals.AbstractFunctional) -> Features:
        seen = self.at_nodes.rows(functional)
        phi = self.prior.root().rmatmul(seen.phi)
        return Features(phi, seen.residual_variance, clamped=seen.clamped)

    @torch.no_grad()
    def operator(self, functional: functionals.AbstractFunctional) -> AbstractOperator:
        return ProductOperator(self.at_nodes.operator(functional), self.prior.root())

    def products(self, functional: functionals.AbstractFunctional, eps: Tensor) -> Tensor:
        return self.at_nodes.products(functional, self.prior.root().matmul(eps))

    def residual_variance(self, functional: functionals.AbstractFunctional) -> Tensor:
        return self.at_nodes.residual_variance(functional)

    def plan_bytes(self, functional: functionals.AbstractFunctional) -> int:
        """Bytes of W and its transpose: the most of any rank."""
        return self.at_nodes.plan_bytes(functional)


#: Features whose residuals vanish at the nodes of grids.
KrigingFeatures: TypeAlias = LocalFeatures | NestedFeatures


@final
@dataclass(frozen=True)
class StencilOrder:
    """The chosen order p and the reason in words, for the run's report."""

    order: int
    reason: str


@torch.no_grad()
def stencil_order(
    features: Mapping[int, KrigingFeatures],
    functional: functionals.AbstractFunctional,
    noise_variance: Tensor,
    *,
    gain: float = 0.1,
    sample: int = 1000,
) -> StencilOrder:
    """Choose p = 4 of features of both orders, unless p = 2 does as well for rays.

    Points and derivatives take 4. Rays take 2 where 4 would lower the variance Var r_n + σ_n² of
    the median datum by less than the fraction `gain`, or where W does not fit the features' memory
    with 4 and the median Var r_n is below σ_n² with 2.

    noise_variance (N,) = σ_n²; sample: data drawn for the comparison.
    """
    if noise_variance.shape != (len(functional),):
        raise UserError(
            f"noise_variance must be ({len(functional)},), one per datum, "
            f"got {tuple(noise_variance.shape)}"
        )
    drawn = torch.randperm(len(functional), generator=torch.Generator().manual_seed(0))[:sample]
    drawn = drawn.to(functional.device)
    noise = noise_variance[drawn].double()
    some = functionals.whole(functional[drawn])
    left = [features[p].residual_variance(some).double() for p in ORDERS]
    ratio2 = float((left[0] / noise).nanmedian())
    lowered = float((1.0 - (left[1] + noise) / (left[0] + noise)).nanmedian())
    bytes4, memory = features[4].plan_bytes(functional), features[4].memory
    if not _has_rays(functional):
        return StencilOrder(4, "points and derivatives take 4 nodes per axis")
    if lowered < gain:
        return StencilOrder(2, f"4 nodes per axis would lower Var r + σ² by {lowered:.1%} only")
    if bytes4 > memory and ratio2 < 1.0:
        needs = f"W with 4 nodes per axis needs {bytes4:,} bytes, more than {memory:,}"
        return StencilOrder(2, f"{needs}, and the median Var r / σ² is {ratio2:.2g} with 2")
    return StencilOrder(4, f"4 nodes per axis lower Var r + σ² by {lowered:.1%}")


def _has_rays(functional: functionals.AbstractFunctional) -> bool:
    """Tell whether there are rays among the functionals."""
    if isinstance(functional, functionals.Stacked):
        return any(_has_rays(part) for part in functional.parts)
    return isinstance(functionals.local_of(functional), functionals.LineIntegrals)


@final
@dataclass(frozen=True, eq=False)
class LevelResiduals:
    """Draws of residuals of rays on nested grids, those of `CellResiduals` of every grid:

        r_sn = Σ_j √(Var r_nj) ξ_snj,   Var r_nj what grid j leaves of its part of ray n

    with ξ_j the unit residuals of grid j.

    features: of the field; cells: of every grid.
    """

    features: NodeFeatures
    cells: tuple[CellResiduals, ...]

    @staticmethod
    def of(features: NodeFeatures, seed: int, count: int) -> "LevelResiduals":
        """Draws 0, .., S − 1 of a seed; every grid has numbers of its own."""
        cells = (
            CellResiduals.of(grid, padded_by_one(grid), seed + (number << _SEED_BITS), count)
            for number, grid in enumerate(features.nested.grids)
        )
        return LevelResiduals(features, tuple(cells))

    def chosen(self, index: Tensor | slice) -> "LevelResiduals":
        """Some of the draws."""
        return replace(self, cells=tuple(each.chosen(index) for each in self.cells))

    @torch.no_grad()
    def unit(self, rays: functionals.AbstractFunctional, dtype: torch.dtype) -> Tensor:
        """Return r_sn / √(Var r_n) (S, N) of rays."""
        return functionals.by_rows(rays, lambda own: self._columns(own, dtype)).mT

    def _columns(self, rays: functionals.LineIntegrals, dtype: torch.dtype) -> Tensor:
        """Return the same (N, S)."""
        count, grids = len(self.cells[0].draws), self.features.nested.grids
        out = torch.zeros(len(rays), count, dtype=dtype, device=rays.device)
        total = torch.zeros(len(rays), dtype=torch.float64, device=rays.device)
        for part, left in self.features.residuals_of_parts(rays):
            variance = left.clamp_min(0.0)
            unit = self.cells[grids.index(part.grid)].unit(part.functional, dtype)
            out.index_add_(0, part.rows, (variance.sqrt().to(dtype) * unit).mT)
            total.index_add_(0, part.rows, variance)
        return out.div_(total.clamp_min(torch.finfo(dtype).tiny).sqrt().to(dtype)[:, None])


def residual_draws(
    features: AbstractFeatureMap, seed: int, count: int
) -> CellResiduals | LevelResiduals:
    """Draws 0, .., S − 1 of residuals of rays, as these features have them."""
    if isinstance(features, NestedFeatures):
        return LevelResiduals.of(features.at_nodes, seed, count)
    if isinstance(features, NodeFeatures):
        return LevelResiduals.of(features, seed, count)
    if not isinstance(features, AbstractGridFeatures):
        raise TypeError(
            f"shared_residuals needs features of a grid, got {type(features).__name__}: solve "
            "without"
        )
    return CellResiduals.of(features.prior.grid, features.prior.torus_shape, seed, count)


def padded_by_one(grid: RegularGrid) -> tuple[int, ...]:
    """Points of a torus with one cell around a grid, of which nothing is met."""
    return tuple(m + 1 for m in grid.shape)


@final
@dataclass(frozen=True, eq=False)
class _LevelWeights:
    """Weights in the cells of one grid, and what they leave; tables are made when asked for.

    A cell beyond the last node of an axis has no weight but on that.
    """

    cells: CellWeights

    def piece(self, functional: functionals.AbstractFunctional) -> Piece:
        """Rows of W, with the graph of the kernel."""
        if isinstance(functional, functionals.LineIntegrals):
            return self.cells.piece(functional, self._table)
        sites, table = self.cells.of_nodes(box_nodes(functional, self.cells.grid))
        return Piece.uncut(table, sites, max(1, sites.count))

    def residual(self, functional: functionals.AbstractFunctional) -> Tensor:
        """Var r (N,) but for round-off, differentiable in the kernel; float64."""
        stencil, grid = self.cells.stencil, self.cells.grid
        if not isinstance(functional, functionals.LineIntegrals):
            return point_variance(stencil, box_nodes(functional, grid).offset)
        torus, kernel = padded_by_one(grid), stencil.kernel
        return banded_variance(self._residuals, grid, torus, functional, kernel)

    @cached_property
    def _table(self) -> Tensor:
        return self.cells.stencil.table()

    @cached_property
    def _residuals(self) -> ResidualTable:
        return ResidualTable.of(self.cells.stencil)
