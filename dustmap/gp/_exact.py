"""The dense exact Gaussian process: the oracle of the tests, and the engine for small data.

Its log evidence, the gradient of that, and the errors of its factor.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap.errors import UserError
from dustmap.gp._batch import AbstractPosterior, Batch, Prediction
from dustmap.gp._means import AbstractMean, generalised_least_squares, orthogonal_directions
from dustmap.gp.covariances import AbstractEstimator, ClosedForm, Wrapping
from dustmap.gp.functionals import AbstractFunctional
from dustmap.gp.kernels import AbstractKernel
from dustmap.linalg import chunks, standard_normal

log = logging.getLogger(__name__)
#: Largest N of a dense N × N covariance.
MAX_DATA = 20_000
#: Pairs of functionals whose covariances are computed at once.
_PAIRS = 2**21


def log_evidence(residual: Tensor, noise_variance: Tensor, upper: Sequence[Tensor]) -> Tensor:
    """Return ln N(r; 0, K_ff + diag(σ²)), differentiable once in all arguments.

    residual (N,) = y − m; noise_variance (N,); upper: the rows of K_ff in consecutive slices, each
    from its diagonal block to the right, as `symmetric` takes them.
    """
    value: Tensor = _LogEvidence.apply(residual, noise_variance, *upper)  # type: ignore[no-untyped-call]
    return value


@final
class _LogEvidence(torch.autograd.Function):
    """`log_evidence`, whose gradient needs no derivative of a Cholesky factor."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, noise_variance: Tensor, *upper: Tensor) -> Tensor:
        L = covariance_factor(symmetric(upper), noise_variance)
        value, alpha = log_density(L, residual)
        ctx.rows = [len(block) for block in upper]
        ctx.save_for_backward(L, alpha)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        L, alpha = ctx.saved_tensors
        # ∂ ln N(r; 0, A)/∂A = ½ (α αᵀ − A⁻¹)
        dA = torch.cholesky_inverse(L).mul_(-0.5).addr_(alpha, alpha, alpha=0.5).mul_(grad)
        upper, start = [], 0
        for count in ctx.rows:
            upper.append(dA[start : start + count, start:].clone())
            upper[-1][:, count:] *= 2.0  # right of a diagonal block one stands for two entries
            start += count
        return (-grad * alpha, dA.diagonal(), *upper)


def symmetric(upper: Sequence[Tensor]) -> Tensor:
    """Return the symmetric matrix (N, N) of which `upper` holds the rows from the diagonal on."""
    n = upper[0].shape[1]
    K = torch.empty((n, n), dtype=upper[0].dtype, device=upper[0].device)
    start = 0
    for block in upper:
        rows = slice(start, start + len(block))
        K[rows, start:] = block
        K[start:, rows] = block.mT
        start = rows.stop
    return K


def covariance_factor(covariance: Tensor, noise_variance: Tensor) -> Tensor:
    """Lower Cholesky factor (N, N) of K_ff + diag(σ²), overwriting `covariance` (N, N) = K_ff.

    No jitter is ever added: failure is an error that says what to change.
    """
    covariance.diagonal().add_(noise_variance)
    L: Tensor
    L, info = torch.linalg.cholesky_ex(covariance)
    if int(info) != 0 or not bool(torch.isfinite(L.diagonal()).all()):
        part = float(noise_variance.min() / covariance.diagonal().max())
        raise UserError(
            f"K_ff + diag(noise_variance) of {len(L)} data is not positive definite in float64 "
            f"(at datum {int(info) - 1}; the smallest noise variance is {part:.3g} times the "
            f"largest total variance): raise noise_variance or learn a jitter, drop repeated "
            f"data, or use an estimator of K_ff of higher order"
        )
    return L


def log_density(L: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return ln N(r; 0, A) and α = A⁻¹ r (N,), from the lower factor L (N, N) of A and r (N,).

    −½ rᵀ A⁻¹ r − Σ ln L_ii − (N/2) ln 2π
    """
    alpha = torch.cholesky_solve(residual[:, None], L).squeeze(-1)
    log_root_det = L.diagonal().log().sum()
    constant = 0.5 * len(residual) * math.log(2.0 * math.pi)
    return -0.5 * (residual @ alpha) - log_root_det - constant, alpha


def symmetric_root(covariance: Tensor, scale: float) -> Tensor:
    """Return the root Q (N, N) with Q Qᵀ = covariance, which may be singular.

    A posterior covariance is a difference: eigenvalues within round-off below zero are zeros; one
    below −1e-6 × scale (the prior variance) is an error.
    """
    eigenvalues: Tensor
    vectors: Tensor
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    refuse_negative(eigenvalues, scale, "an eigenvalue of the covariance")
    return vectors * eigenvalues.clamp(min=0.0).sqrt()


def refuse_negative(variance: Tensor, scale: Tensor | float, what: str) -> None:
    """An error where a variance is more negative than the round-off of `scale` explains."""
    bad = ~(variance >= -1e-6 * torch.as_tensor(scale))
    if bool(bad.any()):
        raise UserError(
            f"{what} is {float(variance[bad].min()):.3g}, where the prior variance is "
            f"{float(torch.as_tensor(scale).max()):.3g}: the estimator's covariances are not "
            f"accurate enough for such small noise; use an estimator of higher order or more noise"
        )


@final
@dataclass(frozen=True, eq=False)
class ExactGP:
    """y_n = f_n + noise, f_n = functional of a Gaussian process; dense float64 linear algebra.

    ρ ~ GP(mean, kernel), y ~ N(m, K_ff + diag(σ²)) for data of any kind and any dimension.
    `wrapping` takes the kernel of a torus instead, to compare with a gridded model of equal prior.
    """

    kernel: AbstractKernel
    mean: AbstractMean
    estimator: AbstractEstimator = field(default_factory=ClosedForm)
    wrapping: Wrapping | None = None

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
        return log_evidence(residual, noise_variance.double(), upper)

    @torch.no_grad()
    def condition(
        self,
        functional: AbstractFunctional,
        y: Tensor,
        noise_variance: Tensor,
        *,
        mean_is_fitted: bool = False,
        fit_mean: bool = False,
    ) -> "ExactPosterior":
        """Return the posterior given y (N,) with noise_variance (N,), at the present parameters.

        mean_is_fitted: whether the mean's coefficients were fitted to these data, as by
        `fitted_coefficients`. Their uncertainty is then part of the posterior (universal kriging).
        fit_mean: fit them here, from the same factor.
        """
        _check_data(functional, y, noise_variance)
        L, H, gp = self._factor(functional, noise_variance), self.mean.basis(functional), self
        if fit_mean:
            beta = generalised_least_squares(H, y.double(), L)
            gp = replace(self, mean=self.mean.with_coefficients(beta))
        residual = y.double() - gp.mean.values(functional)
        alpha = torch.cholesky_solve(residual[:, None], L).squeeze(-1)
        trend, directions = H[:, :0], H.new_zeros(H.shape[1], 0)
        if fit_mean or mean_is_fitted:
            white = torch.linalg.solve_triangular(L, H, upper=False)
            trend, directions = orthogonal_directions(white)
        return ExactPosterior(gp, functional, L, alpha, y.dtype, trend, directions)

    @torch.no_grad()
    def fitted_coefficients(
        self, functional: AbstractFunctional, y: Tensor, noise_variance: Tensor
    ) -> Tensor:
        """Generalised-least-squares coefficients β̂ (P,) of the mean."""
        _check_data(functional, y, noise_variance)
        L = self._factor(functional, noise_variance)
        return generalised_least_squares(self.mean.basis(functional), y.double(), L)

    def between(self, f: AbstractFunctional, g: AbstractFunctional) -> Tensor:
        """Return the prior covariances of the functionals, (N, N'), float64."""
        return self.estimator.between(self.kernel, f, g, self.wrapping, dtype=torch.float64)

    def variance(self, functional: AbstractFunctional) -> Tensor:
        """Return the prior variances k_ff (N,), float64."""
        return self.estimator.variance(self.kernel, functional, self.wrapping, dtype=torch.float64)

    @torch.no_grad()
    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """Return the prior covariance K_ff (N, N), float64; refused beyond N = 20,000."""
        _refuse_dense(len(functional))
        return symmetric(list(self._upper_rows(functional)))

    def _factor(self, functional: AbstractFunctional, noise_variance: Tensor) -> Tensor:
        return covariance_factor(self.covariance(functional), noise_variance.double())

    def _upper_rows(self, functional: AbstractFunctional) -> Iterator[Tensor]:
        """Return the rows of K_ff from the diagonal on: half of the pairs."""
        for rows in _chunks(len(functional), len(functional)):
            yield self.between(functional[rows], functional[rows.start :])


@final
@dataclass(frozen=True, eq=False)
class ExactPosterior(AbstractPosterior):
    """The Gaussian process given data.

        E f_* = m_* + K_*f α        Cov f_* = K_** − V_*ᵀV_* + u_* u_*ᵀ
        V_* = L⁻¹ K_f*              u_* = H_* T − V_*ᵀ U

    u is what fitted coefficients of the mean add: T Tᵀ = (Hᵀ A⁻¹ H)⁻¹ is their covariance under a
    flat prior, and L⁻¹ H T = U.

    cholesky (N, N): factor L of A = K_ff + diag(σ²); alpha (N,): A⁻¹ (y − m); dtype: of the
    answers, that of y; trend (N, K): U; directions (P, K): T, K = 0 for known coefficients.
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
        parts = []
        for c in self._chunks(functional):
            part = functional[c]
            K_sf, V = self._whitened(part)
            prior = self.gp.variance(part)
            left = prior - V.square().sum(0)
            refuse_negative(left, prior, "a posterior variance")
            fitted = self._trend_error(part, V).square().sum(1)
            parts.append((self.gp.mean.values(part) + K_sf @ self.alpha, left + fitted))
        mean, variance = (torch.cat(values) for values in zip(*parts, strict=True))
        clamped = int((variance < 0).sum())
        if clamped > 0:
            text = "%d of %d posterior variances were negative by round-off, and set to 0"
            log.warning(text, clamped, len(variance))
        return Prediction(mean.to(self.dtype), variance.clamp(min=0.0).to(self.dtype), clamped)

    @torch.no_grad()
    def log_evidence(self, y: Tensor) -> Tensor:
        """ln N(y; m, K_ff + diag(σ²)) of the data y (N,) it was conditioned on, from its factor."""
        residual = y.double() - self.gp.mean.values(self.functional)
        whole = residual @ self.alpha + len(y) * math.log(2.0 * math.pi)
        return -0.5 * whole - self.cholesky.diagonal().log().sum()

    @torch.no_grad()
    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """Return K_** − V_*ᵀV_* + u_* u_*ᵀ."""
        return self._covariance(functional).to(self.dtype)

    @torch.no_grad()
    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        """Return the joint draws through the symmetric root of the joint covariance."""
        scale = float(self.gp.variance(functional).max())
        root = symmetric_root(self._covariance(functional), scale)
        white = standard_normal((count, len(functional)), generator, root)
        mean = self.predict(functional).mean
        return mean + (white @ root.mT).to(self.dtype)

    def _covariance(self, functional: AbstractFunctional) -> Tensor:
        K = self.gp.covariance(functional)
        V = torch.cat([self._whitened(functional[c])[1] for c in self._chunks(functional)], dim=1)
        u = self._trend_error(functional, V)
        return K.addmm_(V.mT, V, alpha=-1.0).addmm_(u, u.mT)

    def _trend_error(self, functional: AbstractFunctional, V: Tensor) -> Tensor:
        """Return u_* (N_*, K) for V (N, N_*) = L⁻¹ K_f*."""
        return self.gp.mean.basis(functional) @ self.directions - V.mT @ self.trend

    def _whitened(self, functional: AbstractFunctional) -> tuple[Tensor, Tensor]:
        K_sf = self.gp.between(functional, self.functional)
        return K_sf, torch.linalg.solve_triangular(self.cholesky, K_sf.mT, upper=False)

    def _chunks(self, functional: AbstractFunctional) -> Iterator[slice]:
        return _chunks(len(functional), len(self.functional))


def _chunks(n: int, columns: int) -> Iterator[slice]:
    """Slices of range(n) whose rows of `columns` pairs are few enough to compute at once."""
    return chunks(n, max(1, _PAIRS // max(1, columns)))


def _check_data(functional: AbstractFunctional, y: Tensor, noise_variance: Tensor) -> None:
    shape = (len(functional),)
    if y.shape != shape or noise_variance.shape != shape:
        raise UserError(
            f"y and noise_variance must have shape {shape}, one number per functional, got "
            f"{tuple(y.shape)} and {tuple(noise_variance.shape)}"
        )
    # Refuses what is not finite, and noise that is not positive.
    Batch(functional, y.detach().double(), noise_variance.detach().double())
    _refuse_dense(len(functional))


def _refuse_dense(n: int) -> None:
    if n > MAX_DATA:
        needed = 2 * 8 * n**2
        raise UserError(
            f"an exact Gaussian process of N = {n:,} data needs {needed:,} bytes "
            f"({needed / 2**30:.1f} GiB) for its covariance and factor; the largest N is "
            f"{MAX_DATA:,}: use a subset of the data, or a gridded model"
        )
