"""Features of points on a grid and beyond it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp import RegularGrid
from dustmap.gp.features import (
    AbstractFeatureMap,
    ArrangedOperator,
    Features,
    HIPFeatures,
    LocalFeatures,
    TorusFeatures,
    products_by_rows,
    residual_variance_by_rows,
)
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.linalg import AbstractOperator, DenseOperator


@final
@dataclass(frozen=True, eq=False)
class ExtrapolatingFeatures(AbstractFeatureMap):
    """`inner` for points inside the grid, `outer` for those beyond it; both see the same ε.

    outer: HIP rows of the plain kernel. Far from the grid they vanish, and the prior comes back.
    """

    inner: AbstractFeatureMap
    outer: HIPFeatures
    grid: RegularGrid

    @property
    def n_features(self) -> int:
        return self.inner.n_features

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def chunk(self) -> int:
        return min(self.inner.chunk, self.outer.chunk)

    @property
    def prefers_products(self) -> bool:
        return self.inner.prefers_products

    def rows(self, functional: AbstractFunctional) -> Features:
        inside = self._inside(functional)
        if bool(inside.all()):
            return self.inner.rows(functional)
        if not bool(inside.any()):
            return self.outer.rows(functional)
        parts = [self.inner.rows(functional[inside]), self.outer.rows(functional[~inside])]
        order = _order(inside)
        return Features(
            torch.cat([part.phi for part in parts])[order],
            torch.cat([part.residual_variance for part in parts])[order],
            parts[0].solves.merged(parts[1].solves),
        )

    def operator(self, functional: AbstractFunctional) -> AbstractOperator:
        inside = self._inside(functional)
        if bool(inside.all()):
            return self.inner.operator(functional)
        with torch.no_grad():
            outside = DenseOperator(self.outer.rows(functional[~inside]).phi)
        if not bool(inside.any()):
            return outside
        return ArrangedOperator([self.inner.operator(functional[inside]), outside], _order(inside))

    def products(self, functional: AbstractFunctional, eps: Tensor) -> Tensor:
        if bool(self._inside(functional).all()):
            return self.inner.products(functional, eps)
        return products_by_rows(self, functional, eps)

    def residual_variance(self, functional: AbstractFunctional) -> Tensor:
        if bool(self._inside(functional).all()):
            return self.inner.residual_variance(functional)
        return residual_variance_by_rows(self, functional)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.inner.parameters()

    def rebuilt(self) -> "ExtrapolatingFeatures":
        inner = self.inner.rebuilt()
        assert isinstance(inner, HIPFeatures | TorusFeatures | LocalFeatures)
        outer = replace(self.outer, prior=replace(inner.prior, wrapping=None))
        return ExtrapolatingFeatures(inner, outer, self.grid)

    def _inside(self, functional: AbstractFunctional) -> Tensor:
        assert isinstance(functional, PointValues)
        return self.grid.contains(functional.x)


def _order(inside: Tensor) -> Tensor:
    """Where row n is in the concatenation of the rows inside and those outside."""
    return torch.cat([inside.nonzero(), (~inside).nonzero()]).squeeze(-1).argsort()
