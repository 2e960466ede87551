"""The dense exact Gaussian process: the oracle of the tests, and the engine for small data."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp import _evidence
from dustmap.gp._batch import Batch
from dustmap.gp._means import AbstractMean, generalised_least_squares, orthogonal_directions
from dustmap.gp._posterior import AbstractPosterior, Prediction
from dustmap.gp.covariances import AbstractEstimator, ClosedForm, Wrapping
from dustmap.gp.functionals import AbstractFunctional
from dustmap.gp.kernels import AbstractKernel
from dustmap.linalg import standard_normal

#: Largest N of a dense N × N covariance.
MAX_DATA = 10_000
#: Pairs of functionals whose covariances are computed at once.
_PAIRS = 2**21


@final
class ExactGP(nn.Module):
    """y_n = f_n + noise, f_n = functional of a Gaussian process; dense float64 linear algebra.

    ρ ~ GP(mean, kernel), y ~ N(m, K_ff + diag(σ²)) for data of any kind and any dimension.
    `wrapping` takes the kernel of a torus instead, to compare with a gridded model of equal prior.
    """

    def __init__(
        self,
        kernel: AbstractKernel,
        mean: AbstractMean,
        estimator: AbstractEstimator | None = None,
        wrapping: Wrapping | None = None,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.mean = mean
        self.estimator = ClosedForm() if estimator is None else estimator
        self.wrapping = wrapping

    def log_evidence(
        self, functional: AbstractFunctional, y: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """ln p(y) = ln N(y; m, K_ff + diag(σ²)), a float64 scalar; y and noise_variance (N,).

        Differentiable once in the parameters of kernel and mean, in y and in noise_variance, by
        ∂/∂A = ½ (α αᵀ − A⁻¹) with A = K_ff + diag(σ²) and α = A⁻¹(y − m).
        """
        _check_data(functional, y, noise_variance)
        residual = y.double() - self.mean.values(functional)
        upper = list(self._upper_rows(functional))
        return _evidence.log_evidence(residual, noise_variance.double(), upper)

    @torch.no_grad()
    def condition(
        self,
        functional: AbstractFunctional,
        y: Tensor,
        noise_variance: Tensor,
        *,
        mean_is_fitted: bool = False,
    ) -> "ExactPosterior":
        """The posterior given y (N,) with noise_variance (N,), at the present parameters.

        mean_is_fitted: whether the mean's coefficients were fitted to these data, see `fit_mean`.
        Their uncertainty is then part of the posterior (universal kriging); coefficients that are
        given add none.
        """
        _check_data(functional, y, noise_variance)
        residual = y.double() - self.mean.values(functional)
        L = self._factor(functional, noise_variance)
        alpha = torch.cholesky_solve(residual[:, None], L).squeeze(-1)
        H = self.mean.basis(functional)
        trend, directions = H[:, :0], H.new_zeros(H.shape[1], 0)
        if mean_is_fitted:
            white = torch.linalg.solve_triangular(L, H, upper=False)
            trend, directions = orthogonal_directions(white)
        return ExactPosterior(copy.deepcopy(self), functional, L, alpha, y.dtype, trend, directions)

    @torch.no_grad()
    def fit_mean(self, functional: AbstractFunctional, y: Tensor, noise_variance: Tensor) -> None:
        """Sets the mean's coefficients to their generalised-least-squares values, in place."""
        _check_data(functional, y, noise_variance)
        L = self._factor(functional, noise_variance)
        self.mean.assign(generalised_least_squares(self.mean.basis(functional), y.double(), L))

    def between(self, f: AbstractFunctional, g: AbstractFunctional) -> Tensor:
        """Prior covariances of the functionals, (N, N'), float64."""
        return self.estimator.between(self.kernel, f, g, self.wrapping, dtype=torch.float64)

    def variance(self, functional: AbstractFunctional) -> Tensor:
        """Prior variances k_ff (N,), float64."""
        return self.estimator.variance(self.kernel, functional, self.wrapping, dtype=torch.float64)

    @torch.no_grad()
    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """Prior covariance K_ff (N, N), float64; refused beyond N = 10,000."""
        _refuse_dense(len(functional))
        return _evidence.symmetric(list(self._upper_rows(functional)))

    def _factor(self, functional: AbstractFunctional, noise_variance: Tensor) -> Tensor:
        return _evidence.covariance_factor(self.covariance(functional), noise_variance.double())

    def _upper_rows(self, functional: AbstractFunctional) -> Iterator[Tensor]:
        """Rows of K_ff from the diagonal on: half of the pairs."""
        for rows in chunks(len(functional), len(functional)):
            yield self.between(functional[rows], functional[rows.start :])


@final
@dataclass(frozen=True, eq=False)
class ExactPosterior(AbstractPosterior):
    """The Gaussian process given data.

        E f_* = m_* + K_*f α        Cov f_* = K_** − V_*ᵀV_* + u_* u_*ᵀ
        V_* = L⁻¹ K_f*              u_* = H_* T − V_*ᵀ U

    u is what fitted coefficients of the mean add: T Tᵀ = (Hᵀ A⁻¹ H)⁻¹ is their covariance under a
    flat prior, and L⁻¹ H T = U.

    gp: the prior, as it was; functional: the N data; cholesky (N, N): factor L of
    A = K_ff + diag(σ²); alpha (N,) = A⁻¹ (y − m); dtype: of the answers, that of y;
    trend (N, K): U; directions (P, K): T; K = 0 where the coefficients are given.
    """

    gp: ExactGP
    functional: AbstractFunctional
    cholesky: Tensor
    alpha: Tensor
    dtype: torch.dtype
    trend: Tensor
    directions: Tensor

    @torch.no_grad()
    def predict(self, functional: AbstractFunctional) -> Prediction:
        """m_* + K_*f α and k_** − ‖V_*‖² + ‖u_*‖², by chunks of the functionals asked for."""
        parts = [self._predict_chunk(functional[c]) for c in self._chunks(functional)]
        mean = torch.cat([mean for mean, _ in parts])
        variance = torch.cat([variance for _, variance in parts])
        clamped = int((variance < 0).sum())
        return Prediction(mean.to(self.dtype), variance.clamp(min=0.0).to(self.dtype), clamped)

    @torch.no_grad()
    def log_evidence(self, y: Tensor) -> Tensor:
        """ln N(y; m, K_ff + diag(σ²)) of the data y (N,) it was conditioned on, from its factor."""
        residual = y.double() - self.gp.mean.values(self.functional)
        whole = residual @ self.alpha + len(y) * math.log(2.0 * math.pi)
        return -0.5 * whole - self.cholesky.diagonal().log().sum()

    @torch.no_grad()
    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """K_** − V_*ᵀV_* + u_* u_*ᵀ."""
        return self._covariance(functional).to(self.dtype)

    @torch.no_grad()
    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        """Joint draws through the symmetric root of the joint covariance."""
        scale = float(self.gp.variance(functional).max())
        root = _evidence.symmetric_root(self._covariance(functional), scale)
        shape = (count, len(functional))
        white = standard_normal(shape, generator, root)
        mean = self.predict(functional).mean
        return mean + (white @ root.mT).to(self.dtype)

    def _covariance(self, functional: AbstractFunctional) -> Tensor:
        K = self.gp.covariance(functional)
        V = torch.cat([self._whitened(functional[c])[1] for c in self._chunks(functional)], dim=1)
        u = self._trend_error(functional, V)
        return K.addmm_(V.mT, V, alpha=-1.0).addmm_(u, u.mT)

    def _predict_chunk(self, functional: AbstractFunctional) -> tuple[Tensor, Tensor]:
        K_sf, V = self._whitened(functional)
        prior = self.gp.variance(functional)
        variance = prior - V.square().sum(0)
        _evidence.refuse_negative(variance, prior, "a posterior variance")
        fitted = self._trend_error(functional, V).square().sum(1)
        return self.gp.mean.values(functional) + K_sf @ self.alpha, variance + fitted

    def _trend_error(self, functional: AbstractFunctional, V: Tensor) -> Tensor:
        """u_* (N_*, K) for V (N, N_*) = L⁻¹ K_f*."""
        return self.gp.mean.basis(functional) @ self.directions - V.mT @ self.trend

    def _whitened(self, functional: AbstractFunctional) -> tuple[Tensor, Tensor]:
        K_sf = self.gp.between(functional, self.functional)
        return K_sf, torch.linalg.solve_triangular(self.cholesky, K_sf.mT, upper=False)

    def _chunks(self, functional: AbstractFunctional) -> Iterator[slice]:
        return chunks(len(functional), len(self.functional))


def chunks(n: int, columns: int) -> Iterator[slice]:
    """Slices of range(n) whose rows of `columns` pairs are few enough to compute at once."""
    step = max(1, _PAIRS // max(1, columns))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _check_data(functional: AbstractFunctional, y: Tensor, noise_variance: Tensor) -> None:
    shape = (len(functional),)
    if y.shape != shape or noise_variance.shape != shape:
        raise ValueError(
            f"y and noise_variance must have shape {shape}, one number per functional, got "
            f"{tuple(y.shape)} and {tuple(noise_variance.shape)}"
        )
    # Refuses what is not finite, and noise that is not positive.
    Batch(functional, y.detach().double(), noise_variance.detach().double())
    _refuse_dense(len(functional))


def _refuse_dense(n: int) -> None:
    if n > MAX_DATA:
        needed = 3 * 8 * n**2
        raise ValueError(
            f"an exact Gaussian process of N = {n:,} data needs {needed:,} bytes "
            f"({needed / 2**30:.1f} GiB) for its covariance, factor and inverse; the largest N is "
            f"{MAX_DATA:,}: use a subset of the data, or a gridded model"
        )
