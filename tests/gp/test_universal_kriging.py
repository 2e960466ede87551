"""Fitted coefficients of the mean add their uncertainty, as dense universal kriging says.

The reference is its textbook form, by numpy: Gauss-Legendre nodes stand for the rays.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dustmap.gp import AbstractMean, ConstantMean, ExactGP, LinearMean
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, PointValues, Stacked
from dustmap.gp.kernels import Matern52
from tests.combinations import covering

Array = NDArray[np.float64]
VARIANCE, LENGTH, NOISE = 0.5, 0.7, 0.04
NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)


@dataclass(frozen=True, eq=False)
class Places:
    """n point values at x and n integrals from a to b: as functionals, and as weights of points."""

    x: Array
    a: Array
    b: Array

    @staticmethod
    def spread(dim: int, n: int, seed: int, stretch: float = 1.0) -> "Places":
        rng = np.random.default_rng(seed)
        return Places(*(stretch * rng.uniform(-1.0, 1.0, (n, dim)) for _ in range(3)))

    def functional(self) -> AbstractFunctional:
        x, a, b = (torch.tensor(part) for part in (self.x, self.a, self.b))
        return Stacked((PointValues(x), LineIntegrals.segment(a, b)))

    def weighted(self) -> tuple[Array, Array]:
        """Points (P, D) and weights (2 n, P)."""
        along = self.a[:, None] + 0.5 * (NODES[:, None] + 1) * (self.b - self.a)[:, None]
        n, J = len(self.x), len(NODES)
        W = np.zeros((2 * n, n + n * J))
        W[:n, :n] = np.eye(n)
        lengths = np.linalg.norm(self.b - self.a, axis=1)
        for i in range(n):
            W[n + i, n + i * J : n + (i + 1) * J] = 0.5 * lengths[i] * WEIGHTS
        return np.concatenate([self.x, along.reshape(n * J, -1)]), W


def covariance(f: Places, g: Places) -> Array:
    (p, V), (q, W) = f.weighted(), g.weighted()
    r = np.sqrt(((p[:, None] - q[None]) ** 2).sum(-1)) / LENGTH
    k = VARIANCE * (1 + math.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-math.sqrt(5) * r)
    return np.asarray(V @ k @ W.T)


def basis(f: Places, linear: bool) -> Array:
    points, W = f.weighted()
    h = np.column_stack([np.ones(len(points)), points]) if linear else np.ones((len(points), 1))
    return np.asarray(W @ h)


def universal_kriging(data: Places, y: Array, at: Places, linear: bool) -> tuple[Array, Array]:
    """Mean (N,) and covariance (N, N) under a flat prior of the coefficients."""
    A = covariance(data, data) + NOISE * np.eye(len(y))
    H, h, k = basis(data, linear), basis(at, linear), covariance(data, at)
    solved = np.linalg.solve(A, np.column_stack([k, H, y]))
    Ak, AH, Ay = solved[:, : k.shape[1]], solved[:, k.shape[1] : -1], solved[:, -1]
    V = np.linalg.inv(H.T @ AH)
    beta = V @ H.T @ Ay
    u = h - k.T @ AH
    mean = h @ beta + k.T @ (Ay - AH @ beta)
    return mean, covariance(at, at) - k.T @ Ak + u @ V @ u.T


def problem(dim: int, linear: bool) -> tuple[Places, Array, Places]:
    data = Places.spread(dim, 15, 1)
    y = basis(data, linear) @ np.arange(1.0, 1.0 + (1 + dim if linear else 1))
    y += 0.3 * np.random.default_rng(2).standard_normal(len(y))
    return data, y, Places.spread(dim, 6, 3, stretch=3.0)


def mean_of(dim: int, linear: bool) -> AbstractMean:
    return LinearMean([0.0] * dim) if linear else ConstantMean()


@pytest.mark.parametrize(
    ("dim", "linear", "dtype"),
    covering([1, 2, 3], [False, True], [torch.float32, torch.float64], together=2),
)
def test_exact_engine_is_universal_kriging(dim: int, linear: bool, dtype: torch.dtype) -> None:
    data, y, at = problem(dim, linear)
    gp = ExactGP(Matern52(LENGTH, VARIANCE, dim=dim), mean_of(dim, linear))
    seen, target = data.functional(), torch.tensor(y, dtype=dtype)
    noise = torch.full_like(target, NOISE)
    fitted = gp.mean.with_coefficients(gp.fitted_coefficients(seen, target, noise))
    gp = replace(gp, mean=fitted)
    posterior = gp.condition(seen, target, noise, mean_is_fitted=True)
    mean, C = universal_kriging(data, target.double().numpy(), at, linear)
    tight = 1e-6 if dtype == torch.float64 else 1e-4
    found = posterior.predict(at.functional())
    scale = math.sqrt(C.diagonal().max())
    np.testing.assert_allclose(found.mean, mean, atol=tight * scale)
    np.testing.assert_allclose(found.std, np.sqrt(C.diagonal()), rtol=tight)
    np.testing.assert_allclose(posterior.covariance(at.functional()), C, atol=tight * scale**2)
    draws = posterior.sample(at.functional(), 4000, torch.Generator().manual_seed(0)).double()
    # 6 standard errors of a covariance.
    error = np.sqrt((C**2 + np.outer(C.diagonal(), C.diagonal())) / 4000)
    assert (np.abs(np.cov(draws.numpy().T) - C) / error).max() < 6


@pytest.mark.parametrize("linear", [False, True])
def test_given_coefficients_add_nothing(linear: bool) -> None:
    data, y, at = problem(2, linear)
    gp = ExactGP(Matern52(LENGTH, VARIANCE, dim=2), mean_of(2, linear))
    target = torch.tensor(y)
    posterior = gp.condition(data.functional(), target, torch.full_like(target, NOISE))
    k = covariance(data, at)
    A = covariance(data, data) + NOISE * np.eye(len(y))
    simple = covariance(at, at) - k.T @ np.linalg.solve(A, k)
    np.testing.assert_allclose(posterior.covariance(at.functional()), simple, atol=1e-7)


def test_coefficients_that_data_do_not_determine_add_what_is_determined() -> None:
    """All data at one place: the slope stays as it is, the intercept is that of a constant."""
    data = Places(np.zeros((3, 1)), np.zeros((3, 1)), np.zeros((3, 1)) + 1e-9)
    at = torch.zeros(1, 1, dtype=torch.float64)
    gp = ExactGP(Matern52(LENGTH, VARIANCE, dim=1), LinearMean([0.0]))
    seen = PointValues(torch.tensor(data.x))
    y = torch.ones(3, dtype=torch.float64)
    found = gp.condition(seen, y, torch.full_like(y, NOISE), mean_is_fitted=True)
    # A flat prior on the level and a field that is all one value there: the noise's σ²/3 is left.
    assert float(found.predict(PointValues(at)).variance) == pytest.approx(NOISE / 3)
