"""Features of local kriging weights: sparse rows, two FFTs, whatever the number of data."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import functionals
from dustmap.gp._grid import RegularGrid
from dustmap.gp.features import _local_weights
from dustmap.gp.features._base import AbstractGridFeatures, Features, refuse_outside
from dustmap.gp.features._nodes import PER_CELL, Nodes, node_count, nodes_of, ray_steps
from dustmap.gp.features._operators import ArrangedOperator, ProductOperator
from dustmap.gp.features._residuals import LocalResiduals
from dustmap.gp.features._stencil import Stencil
from dustmap.linalg import AbstractOperator, chunks

log = logging.getLogger(__name__)

#: From so many rays on, rows of W are stored in the order of `functionals.neighbours_together`.
MANY_RAYS = 10_000


@final
@dataclass(frozen=True, eq=False)
class CellWeights:
    """Kriging weights in the cells of a grid: of rays by one table, of other nodes exactly.

    shape: points per axis, around which cells and stencils wrap; mirrors: of a grid without a
    torus, see `sites_of`.
    """

    stencil: Stencil
    grid: RegularGrid
    shape: tuple[int, ...]
    mirrors: bool = False

    def of_rays(self, rays: functionals.LineIntegrals) -> _local_weights.Sites:
        """Sites of rays on the stencil's table: nodes at the nearest of its offsets."""
        row, position, weight = ray_steps(rays, self.grid, PER_CELL)
        cell, entry = self.stencil.nearest(position)
        shifts = self.stencil.axis_shifts(row.device)
        laid = shifts, self.shape, self.mirrors
        return _local_weights.sites_of(row, cell, entry, weight, len(rays), *laid)

    def of_nodes(
        self, nodes: Nodes, direction: Tensor | None = None
    ) -> tuple[_local_weights.Sites, Tensor]:
        """Sites of nodes with a table of their own, exact weights (Q, P) of every node, or of
        derivatives along a direction (Q, D)."""
        entry = torch.arange(len(nodes), device=nodes.cell.device)
        shifts = self.stencil.axis_shifts(entry.device)
        sites = _local_weights.sites_of_nodes(nodes, entry, shifts, self.shape, self.mirrors)
        return sites, self.stencil.weights(nodes.offset, direction)

    def piece(self, rays: functionals.LineIntegrals, table: Tensor) -> _local_weights.Piece:
        """Rows of rays, a chunk at a time."""
        return _local_weights.Piece(
            table, lambda part: self.of_rays(rays[part]), len(rays), self.rows_at_once(rays)
        )

    def rows_at_once(self, observed: functionals.Observed) -> int:
        """Count the rows of a chunk, so that its nodes times P are about `CHUNK_ENTRIES`."""
        nodes = node_count(observed, self.grid)
        per_row = max(1, nodes // max(1, len(observed)))
        return max(1, _local_weights.CHUNK_ENTRIES // (per_row * self.stencil.size))


@final
@dataclass(frozen=True, eq=False)
class LocalFeatures(AbstractGridFeatures):
    """Φ = W C^{1/2}: u = C^{1/2} ε on the torus, and kriging weights W on p^D nodes around data.

    The weights of a point or derivative are exact; a ray sums rows of one table over its steps.
    An operator whose rows are recomputed follows the kernel: use it before the kernel changes.

    prior: the wrapped kernel on box + padding, `GridPrior.padded`; estimator: of k_ff, and of K_fu
    where the residual variance needs it; order: p, nodes per axis of the stencil, of which 4 are
    within a few percent of conditioning on the whole grid and 2 are cheaper and rougher; memory:
    bytes that W and its transpose may take, beyond which rows are recomputed in every product.
    """

    prefers_products = True

    order: int = 4
    memory: int = 2**31

    def __post_init__(self) -> None:
        if self.prior.wrapping is None:
            raise UserError(
                "LocalFeatures needs the wrapped kernel of GridPrior.padded: the minimal embedding "
                "may have no root on its torus"
            )
        Stencil.of(self.prior, self.order)

    @property
    def cells(self) -> CellWeights:
        """Weights at the kernel's present parameters."""
        prior = self.prior
        return CellWeights(Stencil.of(prior, self.order), prior.grid, prior.torus_shape)

    def rows(self, functional: functionals.AbstractFunctional) -> Features:
        self._check(functional)
        weights = self._arranged(functional, lambda p: p.dense(self.n_features, self.dtype))
        phi = self.prior.torus_root(0.5).matmul(weights)
        residuals = self._residuals.variance(functional)
        return Features(phi, residuals.value, clamped=residuals.clamped)

    def operator(self, functional: functionals.AbstractFunctional) -> AbstractOperator:
        with torch.no_grad():
            return ProductOperator(self.weights(functional), self.prior.torus_root(0.5))

    @torch.no_grad()
    def weights(self, functional: functionals.AbstractFunctional) -> AbstractOperator:
        """Return W (N, M_w), stored where it fits the memory; carries no graph."""
        return functionals.operator_by_rows(functional, self._all_weights)

    def _all_weights(self, functional: functionals.AbstractFunctional) -> AbstractOperator:
        self._check(functional)
        planned = self.plan_bytes(functional)
        keep = planned <= self.memory
        how = "stored" if keep else "recomputed in every product"
        log.debug("W of %d data needs %d bytes: %s", len(functional), planned, how)
        if isinstance(functional, functionals.Stacked):
            parts = [self._part_weights(part, keep) for part in functional.parts]
            return ArrangedOperator(parts, functional.order)
        return self._part_weights(functional, keep)

    @torch.no_grad()
    def taps(self, functional: functionals.AbstractFunctional) -> _local_weights.Taps:
        """Return the rows of W of few data of one kind, as they are made."""
        observed = self.estimator.observed(functional, self.prior.kernel)
        return self._source(observed)(slice(0, len(functional)))

    @torch.no_grad()
    def plan_bytes(self, functional: functionals.AbstractFunctional) -> int:
        """Bytes of W and its transpose, known before anything is built: the most of any rank."""
        if isinstance(functional, functionals.Sharded):
            own = torch.tensor([self.plan_bytes(functional.local)])
            return int(functional.world.gathered(own).max())
        if isinstance(functional, functionals.Stacked):
            return sum(self.plan_bytes(part) for part in functional.parts)
        taps = self.taps(functional[_local_weights.spread_rows(functional)])
        return _local_weights.planned_bytes(taps, (len(functional), self.n_features))

    def products(self, functional: functionals.AbstractFunctional, eps: Tensor) -> Tensor:
        self._check(functional)
        u = self.prior.torus_root(0.5).matmul(eps)
        return self._arranged(functional, lambda piece: piece.product(u).mT).mT

    def residual_variance(self, functional: functionals.AbstractFunctional) -> Tensor:
        return functionals.by_rows(functional, lambda f: self._residuals.variance(f).value)

    @cached_property
    def _residuals(self) -> LocalResiduals:
        return LocalResiduals(self.prior, self.estimator, self.order)

    def _check(self, functional: functionals.AbstractFunctional) -> None:
        refuse_outside(functional, self.prior.grid, self.prior.wrapping)

    def _arranged(
        self,
        functional: functionals.AbstractFunctional,
        evaluate: Callable[[_local_weights.Piece], Tensor],
    ) -> Tensor:
        """Return the results (n, ·) of all pieces of the data in the order of the rows: (N, ·)."""
        if isinstance(functional, functionals.Stacked):
            return functional.arrange([self._arranged(f, evaluate) for f in functional.parts])
        return torch.cat([evaluate(piece) for piece in self._pieces(functional)])

    def _pieces(self, functional: functionals.AbstractFunctional) -> Iterator[_local_weights.Piece]:
        """Rays share one table; points bring their own, a chunk at a time."""
        observed, cells = self.estimator.observed(functional, self.prior.kernel), self.cells
        if isinstance(observed, functionals.LineIntegrals):
            table = cells.stencil.table() if torch.is_grad_enabled() else self._detached_table
            yield cells.piece(observed, table)
            return
        size = cells.rows_at_once(observed)
        for part in chunks(max(1, len(observed)), size):
            own, table = self._of_points(observed[part], cells)
            yield _local_weights.Piece.uncut(table, own, size)

    def _of_points(
        self, measure: functionals.PointMeasure, cells: CellWeights
    ) -> tuple[_local_weights.Sites, Tensor]:
        """Sites of points and their own table."""
        values = functionals.PointMeasure(measure.points, measure.weights)
        nodes = nodes_of(values, cells.grid, cells.shape)
        direction = None if measure.direction is None else measure.direction[nodes.row]
        return cells.of_nodes(nodes, direction)

    def _source(self, observed: functionals.Observed) -> _local_weights.TapSource:
        """Return the taps of slices of the data, without a graph."""
        cells = self.cells
        if isinstance(observed, functionals.LineIntegrals):
            rays, table = observed, self._detached_table
            return lambda part: cells.of_rays(rays[part]).taps(table)

        def taps(part: slice) -> _local_weights.Taps:
            sites, weights = self._of_points(observed[part], cells)
            return sites.taps(weights.to(self.dtype))

        return taps

    @cached_property
    def _detached_table(self) -> Tensor:
        with torch.no_grad():
            return self.cells.stencil.table().to(self.dtype)

    def _part_weights(
        self, functional: functionals.AbstractFunctional, keep: bool
    ) -> AbstractOperator:
        observed = self.estimator.observed(functional, self.prior.kernel)
        size, shape = self.cells.rows_at_once(observed), (len(functional), self.n_features)
        build = _local_weights.stored_or_recomputed if keep else _local_weights.RecomputedOperator
        is_many = len(observed) >= MANY_RAYS
        if not (keep and is_many and isinstance(observed, functionals.LineIntegrals)):
            return build(self._source(observed), shape, size, self._like)
        order = functionals.neighbours_together(observed)
        together = build(self._source(observed[order]), shape, size, self._like)
        return ArrangedOperator([together], order.argsort())
