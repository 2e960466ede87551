"""A Gaussian model of data on a grid, for engines that only take products of Φ.

Its posterior mean's equation, with the coefficients of the prior mean eliminated or given, and the
right-hand sides of its pathwise draws, from keyed noise.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.gp import (
    AbstractLatticePrior,
    AbstractMean,
    AbstractParametric,
    Batch,
    GPModel,
    orthogonal_directions,
)
from dustmap.gp.features import (
    AbstractFeatureMap,
    CellResiduals,
    GroupedFeatures,
    LevelResiduals,
    field_features,
)
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, local_of
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference._state import Layout

#: Corrections from a recomputed residual: float32 gains some three digits with each.
_REFINEMENTS = 3
#: Streams of keyed noise: ε₀ by position in the whitened field, ξ by position in the data.
GRID_STREAM, DATA_STREAM = 0, 1
#: Draws whose right-hand sides set the scale of tolerances.
_LENGTHS = 4


@final
@dataclass(frozen=True, eq=False)
class GridModel(AbstractParametric):
    """y = H β + Φ ε + r + noise with ε ~ N(0, I); Σ = diag(noise + Var r).

    features: Φ and Var r; mean: H β; likelihood: the variance of the noise. The residuals r of
    data along one beam are correlated; taking them as independent is this model's approximation.
    Draws may have them correlated all the same: see `SharedResiduals`.
    """

    parts = ("features", "mean", "likelihood")

    features: AbstractFeatureMap
    mean: AbstractMean
    likelihood: GaussianLikelihood

    @staticmethod
    def of(model: GPModel, features: AbstractFeatureMap) -> "GridModel":
        """Mean, noise and zero points of a model, whose field these features see."""
        if model.zero_points is not None:
            features = GroupedFeatures(features, model.zero_points)
        return GridModel(features, model.mean, model.noise)

    def with_fitted_mean(self, coefficients: Tensor) -> "GridModel":
        """Return the model at coefficients β (P,) of the mean, where these are learned."""
        if not self.mean.is_learned:
            return self
        return replace(self, mean=self.mean.with_coefficients(coefficients))

    def sigma(self, data: Batch) -> Tensor:
        """Diagonal of Σ (N,): variance of the noise plus Var r, differentiable."""
        noise = self.likelihood.noise_variance(data)
        return noise + self.features.residual_variance(data.functional).to(noise.dtype)


@final
@dataclass(frozen=True, eq=False)
class SharedResiduals:
    """Residuals r of rays, alike along one beam: draws of them, and their variance (N,).

    The error of ε̂ = Λ⁻¹ΦᵀΣ⁻¹y in data of such residuals has more variance than Λ⁻¹, for many data
    err alike; that of f = φᵀε + r has less than φᵀΛ⁻¹φ + Var r where data see the same r.
    """

    cells: CellResiduals | LevelResiduals
    functional: AbstractFunctional
    variance: Tensor

    @staticmethod
    @torch.no_grad()
    def of(
        features: AbstractFeatureMap,
        cells: CellResiduals | LevelResiduals | None,
        functional: AbstractFunctional,
    ) -> "SharedResiduals | None":
        """Residuals of the field seen by rays; None of other functionals, which share nothing."""
        if cells is None or not isinstance(local_of(functional), LineIntegrals):
            return None
        variance = field_features(features).residual_variance(functional)
        return SharedResiduals(cells, functional, variance.to(features.dtype))

    def draws(self, some: slice = slice(None)) -> Tensor:
        """Return r_s (k, N) of some draws."""
        unit = self.cells.chosen(some).unit(self.functional, self.variance.dtype)
        return unit.mul_(self.variance.sqrt())

    def errors(self, noise: Tensor, sigma: Tensor, some: slice) -> Tensor:
        """Return Σ⁻¹(e − r_s) (k, N), e ~ N(0, Σ − Var r) from white noise (k, N)."""
        own = (sigma - self.variance).clamp_min(0.0).sqrt().to(noise)
        return self.draws(some).neg_().addcmul_(noise, own).div_(sigma.to(noise))


@runtime_checkable
class _OnGrid(Protocol):
    @property
    def prior(self) -> AbstractLatticePrior: ...


def prior_of(features: AbstractFeatureMap, what: str, instead: str) -> AbstractLatticePrior:
    """The prior of features that have one; `what` needs it, and `instead` says what to do."""
    field = field_features(features)
    if not isinstance(field, _OnGrid):
        raise TypeError(
            f"{what} needs features of a GridPrior, got {type(field).__name__}: {instead}"
        )
    return field.prior


@final
@dataclass(frozen=True, eq=False)
class MeanProfile:
    """min over ε and β of ‖y − Hβ − Φε‖²_{Σ⁻¹} + ‖ε‖², as an equation for ε alone.

        (I + ΦᵀΠΦ) ε = ΦᵀΠ y        Π = D(I − U Uᵀ)D,  D = Σ^{-1/2},  D H = U S Vᵀ

    Its solution sees β at its generalised-least-squares value. With β given, U is empty and this
    is Λ ε = ΦᵀΣ⁻¹(y − Hβ).

    phi: Φ. D (N,), U (N, K), float64, K the directions of H that the data determine.
    target (N,): D(y − Hβ₀), float64. coefficients (P,): β₀. directions (P, K): D H directions = U.
    """

    phi: linalg.AbstractOperator
    D: Tensor
    U: Tensor
    target: Tensor
    coefficients: Tensor
    directions: Tensor

    @staticmethod
    def of(
        model: GridModel, data: Batch, sigma: Tensor, phi: linalg.AbstractOperator, fit: bool
    ) -> "MeanProfile":
        """Build at the model's β, or with β free to fit."""
        H = model.mean.basis(data.functional)
        beta = model.mean.coefficients().detach()
        D = sigma.double().rsqrt()
        columns = slice(None) if fit else slice(0, 0)
        U, directions = orthogonal_directions(D[:, None] * H[:, columns])
        rows = torch.zeros(len(beta), U.shape[1], dtype=D.dtype, device=D.device)
        rows[columns] = directions
        return MeanProfile(phi, D, U, D * (data.y.double() - H @ beta), beta, rows)

    @property
    def is_fitted(self) -> bool:
        """Whether the data determine any coefficient that was left free."""
        return self.U.shape[1] > 0

    def misfit(self, x: Tensor) -> Tensor:
        """D(y − Hβ̂ − Φx) (N,) at the best β̂ for x (M_w,), float64."""
        z = self._misfit(x)
        return z - self.U @ (self.U.mT @ z)

    def residual(self, x: Tensor) -> Tensor:
        """Return the residual at x (M_w,): the misfit, not Φᵀy, is rounded to phi's dtype."""
        return self.phi.rmatmul((self.D * self.misfit(x)).to(self.phi.dtype)) - x

    def fitted_coefficients(self, x: Tensor) -> Tensor:
        """β̂ (P,) at x (M_w,): weighted least squares of y − Φx."""
        return self.coefficients + self.directions @ (self.U.mT @ self._misfit(x))

    def refined(
        self,
        x: Tensor,
        tolerance: float,
        preconditioner: linalg.AbstractOperator | None,
        max_steps: int,
        progress: linalg.Progress = linalg.unwatched,
    ) -> "MeanEstimate":
        """x corrected by PCG until the residual's norm is within `tolerance`.

        Every correction solves for a freshly computed residual, which takes float32 below the
        rounding errors of Φᵀy.
        """
        operator, steps, status = _ProfiledPrecision(self), 0, linalg.SolveStatus.MAX_STEPS
        r = self.residual(x)
        norm = float(r.norm())
        for _ in range(_REFINEMENTS):
            if norm <= tolerance or steps >= max_steps:
                break
            rtol = 0.9 * tolerance / norm
            result = linalg.pcg(
                operator,
                r,
                preconditioner=preconditioner,
                rtol=rtol,
                max_steps=max_steps - steps,
                progress=progress,
            )
            steps, status = steps + int(result.steps), result.worst
            r = self.residual(x + result.x)
            if not float(r.norm()) < norm:
                break
            x, norm = x + result.x, float(r.norm())
        if norm <= tolerance:
            status = linalg.SolveStatus.CONVERGED
        elif status is linalg.SolveStatus.CONVERGED:
            status = linalg.SolveStatus.STAGNATED
        return MeanEstimate(x, status, steps, norm)

    def _misfit(self, x: Tensor) -> Tensor:
        return self.target - self.D * self.phi.matmul(x).double()


@final
@dataclass(frozen=True, eq=False)
class MeanEstimate:
    """ε̂ (M_w,), how its refinement ended and after how many steps, and its residual's norm."""

    x: Annotated[Tensor, Layout("field", "M")]
    status: linalg.SolveStatus
    steps: int
    residual: float


@final
class _ProfiledPrecision(linalg.AbstractSymmetric):
    """I + ΦᵀΠΦ (M_w, M_w)."""

    def __init__(self, profile: MeanProfile) -> None:
        self._phi = profile.phi
        self._D, self._U = profile.D.to(self.dtype), profile.U.to(self.dtype)

    def _made_of(self) -> linalg.AbstractOperator:
        return self._phi

    def matmul(self, x: Tensor) -> Tensor:
        seen = self._D * self._phi.matmul(x)
        seen = seen - (seen @ self._U) @ self._U.mT
        return x + self._phi.rmatmul(self._D * seen)


@final
@dataclass(frozen=True, eq=False)
class Draws:
    """b_s = ε₀ + ΦᵀΣ^{-1/2}ξ with ε₀, ξ ~ N(0, I), so that Λ⁻¹b_s ~ N(0, Λ⁻¹).

    With residuals that data share, b_s = ε₀ + ΦᵀΣ⁻¹(e − r_s), e ~ N(0, Σ − Var r): then Λ⁻¹b_s is
    the error of the mean of data with the residual r_s, and no draw of N(0, Λ⁻¹).

    The number at position i of draw s depends on (seed, s, i) only.

    phi: Φ (N, M_w). sigma (N,): Σ. count: number of draws. residuals: of the data, by draws.
    """

    phi: linalg.AbstractOperator
    sigma: Tensor
    seed: int
    count: int
    residuals: SharedResiduals | None = None

    def right_hand_sides(self, first: int, last: int) -> Tensor:
        """b_s for s from first to last − 1, (k, M_w)."""
        b = self.phi.rmatmul(self.weighted_errors(slice(first, last)))
        for row, s in enumerate(range(first, last)):
            b[row] += self._noise(s, GRID_STREAM)
        return b

    def white(self, stream: int, some: slice) -> Tensor:
        """ε₀ (k, M_w) of draws from the stream of the grid, ξ (k, N) from that of the data."""
        return torch.stack([self._noise(s, stream) for s in range(some.start, some.stop)])

    def weighted_errors(self, some: slice) -> Tensor:
        """Σ^{-1/2}ξ (k, N), or Σ⁻¹(e − r_s), of draws."""
        noise = self.white(DATA_STREAM, some)
        if self.residuals is None:
            return noise * self.sigma.rsqrt().to(self.phi.dtype)
        return self.residuals.errors(noise, self.sigma, some)

    @cached_property
    def length(self) -> float:
        """√tr Λ = (E‖b_s‖²)^½, by a few of them."""
        few = replace(self, residuals=None).right_hand_sides(0, min(_LENGTHS, self.count))
        return float(few.double().square().sum(-1).mean().sqrt())

    def _noise(self, sample: int, stream: int) -> Tensor:
        size = self.phi.shape[0] if stream == DATA_STREAM else self.phi.shape[1]
        normal = linalg.KeyedNormal(self.seed, stream)
        return normal.draw(sample, size, self.phi.dtype, self.phi.device)
