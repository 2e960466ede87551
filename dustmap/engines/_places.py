"""Places seen through a grid of inducing points: beyond it, and great numbers within it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.gp import AbstractPosterior, GridPrior, Parameter, Prediction, RegularGrid, features
from dustmap.gp.features import AbstractFeatureMap, Features, HIPFeatures
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.inference import GriddedDraws, VariationalPosterior
from dustmap.linalg import AbstractOperator, DenseOperator

#: Draws of the field, from which the variance that distances add is computed.
DRAWS = 8


@final
@dataclass(frozen=True, eq=False)
class ExtrapolatingFeatures(AbstractFeatureMap):
    """`inner` for points inside the grid, `outer` for those beyond it; both see the same ε.

    outer: HIP rows of the plain kernel, since the images of the wrapped one would repeat the
    opposite face. Far from the grid they vanish, and the prior comes back.
    """

    inner: AbstractFeatureMap
    outer: HIPFeatures
    grid: RegularGrid

    @staticmethod
    def around(
        inner: AbstractFeatureMap, prior: GridPrior, rtol: float, max_steps: int
    ) -> "ExtrapolatingFeatures":
        """`inner` of a prior on a torus, with outer rows to a relative residual of `rtol`."""
        plain = replace(prior, wrapping=None)
        return ExtrapolatingFeatures(
            inner, HIPFeatures(plain, rtol=rtol, max_steps=max_steps), prior.grid
        )

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
        return features.ArrangedOperator(
            [self.inner.operator(functional[inside]), outside], _order(inside)
        )

    def products(self, functional: AbstractFunctional, eps: Tensor) -> Tensor:
        if bool(self._inside(functional).all()):
            return self.inner.products(functional, eps)
        return features.products_by_rows(self, functional, eps)

    def residual_variance(self, functional: AbstractFunctional) -> Tensor:
        if bool(self._inside(functional).all()):
            return self.inner.residual_variance(functional)
        return features.residual_variance_by_rows(self, functional)

    def parameters(self) -> tuple[Parameter, ...]:
        return self.inner.parameters()

    def with_parameters(self, parameters: Sequence[Parameter]) -> "ExtrapolatingFeatures":
        inner = self.inner.with_parameters(parameters)
        assert isinstance(inner, HIPFeatures | features.TorusFeatures | features.LocalFeatures)
        outer = replace(self.outer, prior=replace(inner.prior, wrapping=None))
        return ExtrapolatingFeatures(inner, outer, self.grid)

    def _inside(self, functional: AbstractFunctional) -> Tensor:
        assert isinstance(functional, PointValues)
        return self.grid.contains(functional.x)


def _order(inside: Tensor) -> Tensor:
    """Return the place of row n in the concatenation of the rows inside and those outside."""
    return torch.cat([inside.nonzero(), (~inside).nonzero()]).squeeze(-1).argsort()


@final
@dataclass(frozen=True, eq=False)
class PlacesAndRays(AbstractPosterior):
    """One q(ε), seen by rays through `rays` and by places, of which a map has a hundred times as
    many, through `places`."""

    places: VariationalPosterior
    rays: VariationalPosterior

    @staticmethod
    def of(posterior: VariationalPosterior) -> AbstractPosterior:
        """Places by the weights of the 4³ nodes around them, where all weights would be a PCG.

        Both are features of the same ε, Φ = W C^{1/2}, and Var r is that of the weights W taken.
        At 2.5 nodes a length scale of a Matérn-1/2 kernel it is within 0.2 % of that of all
        weights, and a place costs a ninth.
        """
        phi = posterior.model.features
        if not isinstance(phi, HIPFeatures) or phi.is_dense:
            return posterior
        local = features.LocalFeatures(phi.prior, phi.estimator)
        places = replace(posterior, model=replace(posterior.model, features=local))
        return PlacesAndRays(places, posterior)

    def predict(self, functional: AbstractFunctional) -> Prediction:
        return self._for(functional).predict(functional)

    def covariance(self, functional: AbstractFunctional) -> Tensor:
        return self._for(functional).covariance(functional)

    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        return self._for(functional).sample(functional, count, generator)

    def _for(self, functional: AbstractFunctional) -> VariationalPosterior:
        return self.places if isinstance(functional, PointValues) else self.rays


@torch.no_grad()
def draws_at_inducing_points(
    posterior: VariationalPosterior, count: int, seed: int
) -> GriddedDraws:
    """`count` draws m + R ε at the nodes of the prior's grid, which have no residual."""
    phi, generator = posterior.model.features, torch.Generator().manual_seed(seed)
    assert isinstance(phi, HIPFeatures | features.TorusFeatures)
    grid, eps = phi.prior.grid, posterior.state.sample(count, generator)
    mean = posterior.model.mean.values(PointValues(grid.points(device=eps.device)))
    return GriddedDraws(grid, mean.to(eps.dtype) + phi.prior.root().matmul(eps))


def draws_on_grid(posterior: VariationalPosterior, grid: RegularGrid, seed: int) -> GriddedDraws:
    """Draws at the inducing points, whatever their whitening."""
    if isinstance(posterior.model.features, features.CholeskyFeatures | features.CIQFeatures):
        return GriddedDraws.of(posterior, grid, DRAWS, seed)
    return draws_at_inducing_points(posterior, DRAWS, seed)
