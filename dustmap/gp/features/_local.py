"""Features of local kriging weights: sparse rows, two FFTs, whatever the number of data."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp.features._base import AbstractGridFeatures, Features, refuse_outside, rows_within
from dustmap.gp.features._local_weights import (
    Piece,
    RecomputedOperator,
    Sites,
    Taps,
    TapSource,
    planned_bytes,
    spread_rows,
    stored_or_recomputed,
)
from dustmap.gp.features._nodes import PER_CELL
from dustmap.gp.features._operators import ArrangedOperator, ProductOperator
from dustmap.gp.features._residuals import LocalResiduals
from dustmap.gp.features._stencil import MANY_RAYS, Layout, Stencil, neighbours_together
from dustmap.gp.functionals import (
    AbstractFunctional,
    LineIntegrals,
    Observed,
    PointMeasure,
    Sharded,
    Stacked,
    by_rows,
    operator_by_rows,
)
from dustmap.linalg import AbstractOperator, chunks

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, eq=False)
class LocalFeatures(AbstractGridFeatures):
    """Φ = W C^{1/2}: u = C^{1/2} ε on the torus, and kriging weights W on p^D nodes around data.

    The weights of a point or derivative are exact; a ray sums rows of one table over its steps.
    An operator whose rows are recomputed follows the kernel: use it before the kernel changes.

    Parameters
    ----------
    prior
        The wrapped kernel on box + padding, `GridPrior.padded`.
    estimator
        Of k_ff, and of K_fu where the residual variance needs it.
    order
        p, nodes per axis of the stencil; 4 is within a few percent of conditioning on the whole
        grid, 2 is cheaper and rougher.
    memory
        Bytes that W and its transpose may take; beyond, rows are recomputed in every product.
    per_cell
        Steps of a ray per cell (`nodes_of`).
    """

    order: int = 4
    memory: int = 2**31
    per_cell: float = PER_CELL

    def __post_init__(self) -> None:
        if self.prior.wrapping is None:
            raise UserError(
                "LocalFeatures needs the wrapped kernel of GridPrior.padded: the minimal embedding "
                "may have no root on its torus"
            )
        if not self.per_cell > 0:
            raise UserError(f"per_cell must be positive, got {self.per_cell}")
        Stencil.of(self.prior, self.order)

    @property
    def prefers_products(self) -> bool:
        return True

    @property
    def chunk(self) -> int:
        return rows_within(self.memory, 6 * self.n_features * self.dtype.itemsize)

    @property
    def stencil(self) -> Stencil:
        """The stencil at the kernel's present parameters."""
        return Stencil.of(self.prior, self.order)

    @property
    def layout(self) -> Layout:
        """The stencil on the prior's torus."""
        return Layout(self.stencil, self.prior.grid, self.prior.torus_shape, self.per_cell)

    def rows(self, functional: AbstractFunctional) -> Features:
        self._check(functional)
        weights = self._arranged(functional, lambda p: p.dense(self.n_features, self.dtype))
        phi = self.prior.torus_root(0.5).matmul(weights)
        residuals = self._residuals.variance(functional)
        return Features(phi, residuals.value, clamped=residuals.clamped)

    def operator(self, functional: AbstractFunctional) -> AbstractOperator:
        with torch.no_grad():
            return ProductOperator(self.weights(functional), self.prior.torus_root(0.5))

    @torch.no_grad()
    def weights(self, functional: AbstractFunctional) -> AbstractOperator:
        """Return W (N, M_w), stored where it fits the memory; carries no graph."""
        return operator_by_rows(functional, self._all_weights)

    def _all_weights(self, functional: AbstractFunctional) -> AbstractOperator:
        self._check(functional)
        planned = self.plan_bytes(functional)
        keep = planned <= self.memory
        how = "stored" if keep else "recomputed in every product"
        log.info("W of %d data needs %d bytes: %s", len(functional), planned, how)
        if isinstance(functional, Stacked):
            parts = [self._part_weights(part, keep) for part in functional.parts]
            return ArrangedOperator(parts, functional.order)
        return self._part_weights(functional, keep)

    @torch.no_grad()
    def taps(self, rays: LineIntegrals) -> Taps:
        """Return the rows of W of few rays, as they are made."""
        observed = self.estimator.observed(rays, self.prior.kernel)
        return self._source(observed)(slice(0, len(rays)))

    @torch.no_grad()
    def plan_bytes(self, functional: AbstractFunctional) -> int:
        """Bytes of W and its transpose, known before anything is built: the most of any rank."""
        if isinstance(functional, Sharded):
            own = torch.tensor([self.plan_bytes(functional.local)])
            return int(functional.world.gathered(own).max())
        if isinstance(functional, Stacked):
            return sum(self.plan_bytes(part) for part in functional.parts)
        sample = functional[spread_rows(len(functional), functional.device)]
        taps = self._source(self.estimator.observed(sample, self.prior.kernel))(
            slice(0, len(sample))
        )
        return planned_bytes(taps, (len(functional), self.n_features))

    def products(self, functional: AbstractFunctional, eps: Tensor) -> Tensor:
        self._check(functional)
        u = self.prior.torus_root(0.5).matmul(eps)
        return self._arranged(functional, lambda piece: piece.product(u).mT).mT

    def residual_variance(self, functional: AbstractFunctional) -> Tensor:
        return by_rows(functional, lambda f: self._residuals.variance(f).value)

    @cached_property
    def _residuals(self) -> LocalResiduals:
        return LocalResiduals(self.prior, self.estimator, self.order, self.per_cell)

    def _check(self, functional: AbstractFunctional) -> None:
        refuse_outside(functional, self.prior.grid, self.prior.wrapping)

    def _arranged(
        self, functional: AbstractFunctional, evaluate: Callable[[Piece], Tensor]
    ) -> Tensor:
        """Return the results (n, ·) of all pieces of the data in the order of the rows: (N, ·)."""
        if isinstance(functional, Stacked):
            return functional.arrange([self._arranged(f, evaluate) for f in functional.parts])
        return torch.cat([evaluate(piece) for piece in self._pieces(functional)])

    def _pieces(self, functional: AbstractFunctional) -> Iterator[Piece]:
        """Rays share one table; points bring their own, a chunk at a time."""
        observed, layout = self.estimator.observed(functional, self.prior.kernel), self.layout
        size = layout.rows_at_once(observed)
        if isinstance(observed, LineIntegrals):
            graph = torch.is_grad_enabled()
            table = layout.stencil.table() if graph else self._detached_table
            yield Piece(table, _ray_sites(layout, observed), len(observed), size)
            return
        for part in chunks(max(1, len(observed)), size):
            sites, table = layout.measure_sites(observed[part])
            yield Piece(table, _fixed(sites), sites.count, size)

    def _source(self, observed: Observed) -> TapSource:
        """Return the taps of slices of the data, without a graph."""
        layout = self.layout
        if isinstance(observed, LineIntegrals):
            table, sites = self._detached_table, _ray_sites(layout, observed)
            return lambda part: sites(part).taps(table)
        return lambda part: _measure_taps(layout, observed[part], self.dtype)

    @cached_property
    def _detached_table(self) -> Tensor:
        with torch.no_grad():
            return self.stencil.table().to(self.dtype)

    def _part_weights(self, functional: AbstractFunctional, keep: bool) -> AbstractOperator:
        observed = self.estimator.observed(functional, self.prior.kernel)
        size, shape = self.layout.rows_at_once(observed), (len(functional), self.n_features)
        if not keep:
            return RecomputedOperator(self._source(observed), shape, size, self._like)
        if not isinstance(observed, LineIntegrals) or len(observed) < MANY_RAYS:
            return stored_or_recomputed(self._source(observed), shape, size, self._like)
        order = neighbours_together(observed)
        together = stored_or_recomputed(self._source(observed[order]), shape, size, self._like)
        return ArrangedOperator([together], order.argsort())


def _ray_sites(layout: Layout, rays: LineIntegrals) -> Callable[[slice], Sites]:
    """Return the sites of slices of the rays."""
    return lambda part: layout.ray_sites(rays[part])


def _fixed(sites: Sites) -> Callable[[slice], Sites]:
    """Return the sites of all rows of a piece, which is never cut."""
    return lambda part: sites


def _measure_taps(layout: Layout, measure: PointMeasure, dtype: torch.dtype) -> Taps:
    """Return the taps of sums over points, each with weights of its own."""
    sites, table = layout.measure_sites(measure)
    return sites.taps(table.to(dtype))
