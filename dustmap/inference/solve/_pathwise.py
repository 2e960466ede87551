"""The posterior of any functional through draws of ε: no row of Φ, no solve per query.

Draws at the nodes of a grid stand in for any posterior where functionals are too many for it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from dustmap import gp
from dustmap.errors import UserError
from dustmap.gp import functionals
from dustmap.gp.features import (
    AbstractFeatureMap,
    CellResiduals,
    GroupedFeatures,
    JointResiduals,
    LevelResiduals,
    NestedFeatures,
    NodeFeatures,
    chunks,
    field_features,
    interpolation,
)
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.inference._precision import CoefficientSpread
from dustmap.inference.solve import _grid_model
from dustmap.inference.solve._grid_model import GridModel
from dustmap.linalg import KeyedNormal

#: Functionals answered at once.
_CHUNK = 65_536


@final
@dataclass(frozen=True, eq=False)
class PathwisePosterior(gp.AbstractPosterior):
    """f_* = H_* β + φ_*ᵀ ε + r_* with ε = ε̂ + δ, δ ~ N(0, Λ⁻¹) known by S draws δ_s.

        E f = H β + Φ ε̂          Var f = mean_s (Φ δ_s)² + Var r + Σ_k u_k²

    u is what fitted coefficients add (universal kriging, see `CoefficientSpread`), without Monte
    Carlo error but in `sample`, whose draw s has its own β_s; coefficients that are given add none.

    The mean of δ is known to be 0, so the sum over s is divided by S. Its relative standard error
    is `monte_carlo_error` for the standard deviation, twice that for the variance; the mean has
    none.

    With `residuals` the draws δ_s are errors of the mean of data whose residuals r are alike along
    one beam, and those of predicted rays are the same field of residuals:

        Var f = mean_s (Φ δ_s + r_s)² + Σ_k u_k²

    so that what the data behind the same dust say of r counts, and counts once. Without, and of
    functionals that are no rays, residuals are independent of each other and of the data: too much
    for a ray in a beam of many, by as much as Var r is above what is left of it.

    Attributes
    ----------
    model : features and mean at the kernel's value of the solve
    coefficients, eps_mean, deviations : (P,), (M_w,), (S, M_w)
        β, ε̂ and δ_s.
    memory : bytes that the fields seen by one chunk of functionals may take
    spread : of fitted coefficients; None where they are given
    explained : (M,) or None
        Share of the prior's variance at the nodes that the data have taken away, `explained_share`.
    residuals : those of the draws, by which rays share them; None for independent ones
    """

    model: GridModel
    coefficients: Tensor
    eps_mean: Tensor
    deviations: Tensor
    memory: int = 2**28
    spread: CoefficientSpread | None = None
    explained: Tensor | None = None
    residuals: CellResiduals | LevelResiduals | None = None

    @property
    def monte_carlo_error(self) -> float:
        """Relative standard error 1/√(2S) of a standard deviation, S the draws."""
        return 1.0 / math.sqrt(2.0 * len(self.deviations))

    def with_draws(self, index: Tensor | slice) -> "PathwisePosterior":
        """The posterior with some of its draws."""
        spread = None if self.spread is None else self.spread.chosen(index)
        residuals = None if self.residuals is None else self.residuals.chosen(index)
        return replace(self, deviations=self.deviations[index], spread=spread, residuals=residuals)

    @torch.no_grad()
    def mean(self, functional: AbstractFunctional) -> Tensor:
        """E f (N,)."""
        functional = self._measured(functional)
        fields = self.eps_mean[None]
        means = [self._mean(part) + seen[0] for part, seen in self._products(functional, fields)]
        return torch.cat(means)

    @torch.no_grad()
    def predict(self, functional: AbstractFunctional) -> gp.Prediction:
        """Mean (N,) and variance (N,) of f."""
        functional = self._measured(functional)
        last = 1 + len(self.deviations)
        fields = torch.cat([self.eps_mean[None], self.deviations, self._trend_fields])
        means, variances = [], []
        for part, seen in self._products(functional, fields):
            means.append(self._mean(part) + seen[0])
            r, independent = self._residuals(part)
            variance = (seen[1:last] + r).square().mean(0) + independent
            variances.append(variance + self._trend(part, seen[last:]).square().sum(0))
        return gp.Prediction(torch.cat(means), torch.cat(variances))

    @torch.no_grad()
    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """Cov f (N, N) = mean_s (Φδ_s)(Φδ_s)ᵀ + uᵀu + Cov r, of rank S + K but for Cov r
        (`JointResiduals`); Φδ_s + r_s of residuals that are shared."""
        functional = self._measured(functional)
        fields = torch.cat([self.deviations, self._trend_fields])
        seen = torch.cat([seen for _, seen in self._products(functional, fields)], dim=-1)
        count = len(self.deviations)
        r, independent = self._residuals(functional)
        seen, u = seen[:count] + r, self._trend(functional, seen[count:])
        covariance: Tensor = seen.mT @ seen / count + u.mT @ u
        left = JointResiduals.of(self.model.features, functional, independent)
        return covariance.add_(left.covariance().to(covariance))

    @torch.no_grad()
    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        """The first `count` ≤ S stored draws (count, N), the same ε and β for every functional.

        Only residuals r that are not those of the draws are drawn: of values at points jointly
        (`JointResiduals`), else independent per functional, for rays from one number of `generator`
        and their keys.
        """
        if not 1 <= count <= len(self.deviations):
            raise UserError(
                f"count must be between 1 and the {len(self.deviations)} draws of this posterior, "
                f"got {count}: raise `samples` of the solve settings and solve again"
            )
        functional = self._measured(functional)
        eps = self.eps_mean + self.deviations[:count]
        beta = self.coefficients.expand(count, -1)
        if self.spread is not None:
            z = self.spread.draws[:count]
            eps = eps + z.to(eps.dtype) @ self.spread.fields
            beta = beta + z @ self.spread.directions.mT
        parts, variances = [], []
        for part, seen in self._products(functional, eps):
            r, independent = self._residuals(part, slice(count))
            parts.append((self.model.mean.basis(part) @ beta.mT).mT.to(seen.dtype) + seen + r)
            variances.append(independent)
        field, variance = torch.cat(parts, dim=-1), torch.cat(variances)
        return field + self._left(functional, variance, count, generator).to(field)

    def _left(
        self,
        functional: AbstractFunctional,
        variance: Tensor,
        count: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Draws (count, N) of residuals that are not those of the draws; of a ray whatever others
        there are."""
        if isinstance(functional, functionals.LineIntegrals):
            seed = torch.randint(2**62, (1,), device=generator.device, generator=generator)
            white = functionals.keyed_normal(int(seed), functional.keys, count)
            return variance.sqrt() * white.to(variance)
        return JointResiduals.of(self.model.features, functional, variance).draws(count, generator)

    def percentiles(self, functional: AbstractFunctional, q: Tensor) -> Tensor:
        """Quantiles of f (K, N) at probabilities q (K,) in (0, 1).

        f is Gaussian, so they are mean + std · √2 erf⁻¹(2q − 1): far less noisy than the order
        statistics of S draws.
        """
        if q.ndim != 1 or not bool(((q > 0) & (q < 1)).all()):
            raise UserError(
                f"q must be a vector of probabilities in (0, 1), e.g. 0.16, 0.5, 0.84, got {q}"
            )
        prediction = self.predict(functional)
        z = math.sqrt(2.0) * torch.erfinv(2.0 * q.double() - 1.0)
        return prediction.mean + z.to(prediction.std)[:, None] * prediction.std

    @torch.no_grad()
    def at_nodes(self) -> gp.Prediction:
        """Mean (M,) and variance (M,) of the field at the nodes of the grid, by FFT alone.

        There f_i = H_i β + (R ε)_i: the grid explains its nodes, Var r = 0 but for a nugget.
        """
        lattice, field = _nodes_of(self.model.features)
        width = field_features(self.model.features).n_features
        size = max(1, self.memory // (4 * width * self.eps_mean.itemsize))
        nodes = PointValues(lattice.points(device=self.eps_mean.device))
        total = self.eps_mean.new_zeros(lattice.size)
        for part in chunks(len(self.deviations), size):
            total += field(self.deviations[part]).square().sum(0)
        mean = self._mean(nodes) + field(self.eps_mean[None])[0]
        u = self._trend(nodes, field(self._trend_fields))
        return gp.Prediction(mean, total / len(self.deviations) + u.square().sum(0))

    @torch.no_grad()
    def zero_points(self) -> gp.Prediction | None:
        """Mean and variance (G,) of b, the zero points of groups; None where there are none."""
        features = self.model.features
        if not isinstance(features, GroupedFeatures):
            return None
        first, points = features.inner.n_features, features.zero_points
        return self._of_groups(slice(first, first + points.count), points.offsets)

    @torch.no_grad()
    def scales(self) -> gp.Prediction | None:
        """Mean and variance (G,) of s, the scales 1 + s of groups less one; None without."""
        features = self.model.features
        if not isinstance(features, GroupedFeatures) or not features.zero_points.has_scales:
            return None
        first, points = features.inner.n_features, features.zero_points
        variables = slice(first + points.count, None)
        return self._of_groups(variables, lambda c: points.scale_std * c)

    def _of_groups(self, variables: slice, prior: Callable[[Tensor], Tensor]) -> gp.Prediction:
        """Mean and variance (G,) of what the prior makes of white variables (..., G)."""
        mean, draws = prior(self.eps_mean[variables]), prior(self.deviations[:, variables])
        trend = prior(self._trend_fields[:, variables])
        return gp.Prediction(mean, draws.square().mean(0) + trend.square().sum(0))

    def _measured(self, functional: AbstractFunctional) -> AbstractFunctional:
        """The functionals with the responses that scales of their groups multiply: E f."""
        features = self.model.features
        scaled = isinstance(features, GroupedFeatures) and features.zero_points.has_scales
        if not scaled or functionals.groups_of(functional) is None:
            return functional
        return functionals.with_responses(
            functional, self.mean(functionals.without_groups(functional))
        )

    def _products(
        self, functional: AbstractFunctional, eps: Tensor
    ) -> Iterator[tuple[AbstractFunctional, Tensor]]:
        """Chunks of the functionals with Φ ε (k, n) for eps (k, M_w)."""
        size = max(1, self.memory // (4 * max(1, len(eps)) * eps.dtype.itemsize))
        for part in chunks(len(functional), size):
            chunk = functional if len(functional) <= size else functional[part]
            yield chunk, self.model.features.operator(chunk).matmul(eps)

    def _mean(self, functional: AbstractFunctional) -> Tensor:
        values = self.model.mean.basis(functional) @ self.coefficients
        return values.to(self.eps_mean.dtype)

    @property
    def _trend_fields(self) -> Tensor:
        """(K, M_w): what the field does with every direction of the coefficients."""
        if self.spread is None:
            return self.eps_mean.new_zeros(0, len(self.eps_mean))
        return self.spread.fields

    def _trend(self, functional: AbstractFunctional, seen: Tensor) -> Tensor:
        """u (K, N), for its field as the functionals see it, (K, N)."""
        if self.spread is None:
            return seen
        return self.spread.seen(self.model.mean.basis(functional), seen)

    def _residuals(
        self, functional: AbstractFunctional, some: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """r_s (k, N) of some draws, or a zero where they have none, and Var r (N,) of the rest."""
        features = self.model.features
        variance = features.residual_variance(functional).to(self.eps_mean.dtype)
        shared = _grid_model.SharedResiduals.of(features, self.residuals, functional)
        if shared is None:
            return variance.new_zeros(1, 1), variance
        return shared.draws(some), (variance - shared.variance).clamp_min(0.0)


@torch.no_grad()
def explained_share(posterior: PathwisePosterior, seed: int) -> Tensor:
    """Σ_s g_s² / Σ_s (g_s² + d_s²) (M,) at the nodes, with d = R δ and g = R (ε₀ − δ).

    ε₀_s: the draw of the prior that δ_s was made of under `seed`, that of the solve; g is what the
    data have taken from it. Both are independent, but for residuals that data share, and their
    variances add up to the prior's: where the data say nothing the share is 0 however few the
    draws, as 1 − mean d²/σ² is not.
    """
    prior = _grid_model.prior_of(posterior.model.features, "explained_share", "use predict instead")
    taken, left = torch.zeros(2, prior.lattice.size, dtype=prior.dtype, device=prior.device)
    normal = KeyedNormal(seed, _grid_model.GRID_STREAM)
    for s, delta in enumerate(posterior.deviations):
        white = normal.draw(s, len(delta), delta.dtype, delta.device)
        start, rest = field_at_nodes(prior, torch.stack([white, delta]))
        taken += (start - rest).square()
        left += rest.square()
    share: Tensor = taken / (taken + left)
    return share


@torch.no_grad()
def at_the_nodes(posterior: PathwisePosterior) -> PathwisePosterior:
    """The same posterior with the field at the nodes of nested grids, u = R ε, in the place of ε:
    what asks for it then needs rows of W alone, and no transforms."""
    features = posterior.model.features
    nested = field_features(features)
    assert isinstance(nested, NestedFeatures)
    root, width = nested.prior.root(), nested.n_features
    seen: AbstractFeatureMap = nested.at_nodes
    if isinstance(features, GroupedFeatures):
        seen = replace(features, inner=seen)

    def moved(eps: Tensor) -> Tensor:
        return torch.cat([root.matmul(eps[..., :width]), eps[..., width:]], dim=-1)

    spread = posterior.spread
    return replace(
        posterior,
        model=replace(posterior.model, features=seen),
        eps_mean=moved(posterior.eps_mean[None])[0],
        deviations=moved(posterior.deviations),
        spread=None if spread is None else replace(spread, fields=moved(spread.fields)),
    )


def _nodes_of(
    features: AbstractFeatureMap,
) -> tuple[gp.RegularGrid | gp.NestedGrids, Callable[[Tensor], Tensor]]:
    """The nodes, and the field (k, M) there of the variables (k, M_w) that features have."""
    field = field_features(features)
    if isinstance(field, NodeFeatures):
        nested = field.nested
        return nested, lambda u: u[..., : nested.size]
    prior = _grid_model.prior_of(features, "at_nodes", "predict PointValues instead")
    return prior.lattice, partial(field_at_nodes, prior)


@torch.no_grad()
def field_at_nodes(prior: gp.AbstractLatticePrior, eps: Tensor) -> Tensor:
    """u = R ε at the nodes of the grid: eps (k, M_w) to (k, M), one FFT pair per field.

    Zero points, the last numbers of the variables of grouped data, have no part in it.
    """
    return prior.root().matmul(eps[..., : prior.n_white])


@final
@dataclass(frozen=True, eq=False)
class GriddedDraws(gp.AbstractPosterior):
    """f = L u_s with S joint draws u_s of the field at the nodes, multilinear in between.

    An approximation for fields that are rough between the nodes; a functional costs a sparse row,
    whatever the posterior that made the draws asks for one. draws (S, M) in the grid's C order.

    Examples
    --------
    >>> from dustmap.gp.functionals import PointValues
    >>> grid = gp.RegularGrid((0.0,), (1.0,), (3,))
    >>> draws = GriddedDraws(grid, torch.tensor([[0.0, 1.0, 0.0], [0.0, 3.0, 0.0]]))
    >>> draws.predict(PointValues(torch.tensor([[0.5], [1.0]]))).mean
    tensor([1., 2.])
    """

    grid: gp.RegularGrid
    draws: Tensor

    @classmethod
    def of(
        cls, posterior: gp.AbstractPosterior, grid: gp.RegularGrid, count: int, seed: int
    ) -> "GriddedDraws":
        """`count` draws of a posterior at the nodes of `grid`."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            return cls(grid, posterior.sample(PointValues(grid.points()), count, generator))

    @property
    def n_samples(self) -> int:
        """S."""
        return len(self.draws)

    def predict(self, functional: AbstractFunctional) -> gp.Prediction:
        """Mean and variance (N,) over the draws."""
        seen = self._seen(functional)
        return gp.Prediction(seen.mean(0), seen.var(0))

    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """Sample covariance (N, N), of rank S − 1 at most."""
        return torch.cov(self._seen(functional).mT).reshape(2 * (len(functional),))

    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        """The first `count` stored draws (count, N); `generator` is not needed."""
        if not 1 <= count <= self.n_samples:
            raise UserError(f"count must be 1 to the {self.n_samples} draws, got {count}")
        return self._seen(functional)[:count]

    def _seen(self, functional: AbstractFunctional) -> Tensor:
        parts = [functional[part] for part in chunks(len(functional), _CHUNK)]
        dtype = self.draws.dtype
        rows = (interpolation(part, self.grid, dtype=dtype) for part in parts)
        return torch.cat([row.matmul(self.draws) for row in rows], dim=-1)
