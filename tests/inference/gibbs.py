"""A Gibbs sampler of a Gaussian field seen with Student-t noise; numpy alone, dense."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def matern32(x: Array, length: float, std: float) -> Array:
    """Covariance (N, N) of a Matérn-3/2 field at places x (N, D)."""
    r = np.linalg.norm(x[:, None] - x[None], axis=-1) * np.sqrt(3.0) / length
    return np.asarray(std**2 * (1.0 + r) * np.exp(-r))


def gibbs(
    covariance: Array, y: Array, width: Array, nu: float, draws: int, seed: int = 0
) -> tuple[Array, Array]:
    """Posterior mean and standard deviation (N,) of f ~ N(0, K), y = f + width · t_ν.

    By turns f | τ ~ N(K A⁻¹ y, K − K A⁻¹ K) with A = K + diag(width²/τ), and
    τ_n | f ~ Gamma((ν + 1)/2, rate (ν + (y − f)²/width²)/2); a tenth of the draws is burnt. Moments
    are averages of the conditional ones (Rao-Blackwell).
    """
    rng, n = np.random.default_rng(seed), len(y)
    root = np.linalg.cholesky(covariance + 1e-10 * covariance.max() * np.eye(n))
    tau, means, variances = np.ones(n), [], []
    for draw in range(draws):
        noise = width**2 / tau
        solved = np.linalg.solve(covariance + np.diag(noise), np.c_[y, covariance])
        mean = covariance @ solved[:, 0]
        if draw >= draws // 10:
            means.append(mean)
            variances.append(np.diag(covariance) - np.sum(covariance * solved[:, 1:].T, axis=1))
        field = root @ rng.standard_normal(n)
        seen = field + np.sqrt(noise) * rng.standard_normal(n)
        f = field + solved[:, 1:].T @ (y - seen)
        rate = 0.5 * (nu + ((y - f) / width) ** 2)
        tau = rng.gamma(0.5 * (nu + 1.0), 1.0 / rate)
    whole = np.mean(variances, axis=0) + np.var(means, axis=0)
    return np.mean(means, axis=0), np.sqrt(whole)
