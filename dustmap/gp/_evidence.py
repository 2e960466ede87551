"""The log evidence of a dense Gaussian model, its gradient, and the errors of its factor."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def log_evidence(residual: Tensor, noise_variance: Tensor, upper: Sequence[Tensor]) -> Tensor:
    """ln N(r; 0, K_ff + diag(σ²)), differentiable once in all arguments.

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
        dA = density_gradient(L, alpha).mul_(grad)
        return (-grad * alpha, dA.diagonal(), *_upper_gradients(dA, ctx.rows))


def symmetric(upper: Sequence[Tensor]) -> Tensor:
    """The symmetric matrix (N, N) of which `upper` holds the rows from the diagonal on."""
    n = upper[0].shape[1]
    K = torch.empty((n, n), dtype=upper[0].dtype, device=upper[0].device)
    start = 0
    for block in upper:
        rows = slice(start, start + len(block))
        K[rows, start:] = block
        K[start:, rows] = block.mT
        start = rows.stop
    return K


def _upper_gradients(dA: Tensor, rows: Sequence[int]) -> Iterator[Tensor]:
    """∂/∂upper from ∂/∂A: what is right of a diagonal block stands for two entries."""
    start = 0
    for count in rows:
        gradient = dA[start : start + count, start:].clone()
        gradient[:, count:] *= 2.0
        yield gradient
        start += count


def covariance_factor(covariance: Tensor, noise_variance: Tensor) -> Tensor:
    """Lower Cholesky factor (N, N) of K_ff + diag(σ²), overwriting `covariance` (N, N) = K_ff.

    No jitter is ever added: failure is an error that says what to change.
    """
    covariance.diagonal().add_(noise_variance)
    L: Tensor
    L, info = torch.linalg.cholesky_ex(covariance)
    if int(info) != 0 or not bool(torch.isfinite(L.diagonal()).all()):
        raise ValueError(
            f"K_ff + diag(noise_variance) of {len(L)} data is not positive definite in float64 "
            f"(at datum {int(info) - 1}; the smallest noise variance is "
            f"{float(noise_variance.min()):.3g}, the largest total variance "
            f"{float(covariance.diagonal().max()):.3g}): raise noise_variance or learn a jitter, "
            f"drop repeated data, or use an estimator of K_ff of higher order"
        )
    return L


def log_density(L: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """ln N(r; 0, A) and α = A⁻¹ r (N,), from the lower factor L (N, N) of A and r (N,).

    −½ rᵀ A⁻¹ r − Σ ln L_ii − (N/2) ln 2π
    """
    alpha = torch.cholesky_solve(residual[:, None], L).squeeze(-1)
    log_root_det = L.diagonal().log().sum()
    constant = 0.5 * len(residual) * math.log(2.0 * math.pi)
    return -0.5 * (residual @ alpha) - log_root_det - constant, alpha


def density_gradient(L: Tensor, alpha: Tensor) -> Tensor:
    """∂ ln N(r; 0, A)/∂A = ½ (α αᵀ − A⁻¹) (N, N), from the lower factor L of A and α = A⁻¹ r."""
    gradient = torch.cholesky_inverse(L).mul_(-0.5)
    return gradient.addr_(alpha, alpha, alpha=0.5)


def symmetric_root(covariance: Tensor, scale: float) -> Tensor:
    """Root Q (N, N) with Q Qᵀ = covariance, which may be singular.

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
        raise ValueError(
            f"{what} is {float(variance[bad].min()):.3g}, where the prior variance is "
            f"{float(torch.as_tensor(scale).max()):.3g}: the estimator's covariances are not "
            f"accurate enough for such small noise; use an estimator of higher order or more noise"
        )
