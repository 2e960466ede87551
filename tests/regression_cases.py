"""What the tests of regression share."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from dustmap import HIPGPRegressor
from dustmap.gp.kernels import AbstractKernel, Matern32

Array = NDArray[np.float64]


ENGINES = ("exact", "hip", "global")
#: Rows up to which a dense fit is quick, in tests that look at what comes after: see
#: `few_are_quick`. tests/engines/test_automatic.py asserts that they are 2,000.
FEW = 500


def wave(n: int, dim: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Inputs on axes of unlike units, the noise-free target, and noise of standard deviation 1."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(n, dim))
    phase = 6.0 * X[:, 0] + sum(2.0 * X[:, d] for d in range(1, dim))
    truth = 1000.0 + 10.0 * np.sin(phase)
    return X * 10.0 ** np.arange(dim) + 50.0, truth, rng.standard_normal(n)


def two_scales(n: int, noise: float = 0.05) -> tuple[Array, Array]:
    """Waves as long as the square, and turbulence below an eighth of it, of half their deviation.

    Its spectrum falls as k^(−8/3), as that of turbulence in a plane.
    """
    rng = np.random.default_rng(2)
    x, y = rng.uniform(size=(n, 2)), noise * rng.standard_normal(n)
    long, short = rng.uniform(1.0, 1.5, 300), 8.0 * rng.uniform(size=1500) ** -0.6
    for k, std in ((long, 1.0), (short, 0.5)):
        angle, phase = rng.uniform(0.0, 2.0 * np.pi, (2, len(k)))
        direction = 2.0 * np.pi * k * np.stack([np.cos(angle), np.sin(angle)])
        y += std * np.cos(x @ direction + phase).sum(1) * math.sqrt(2.0 / len(k))
    return x, y


def wave_kernel(dim: int) -> AbstractKernel:
    """A prior that suits `wave`."""
    return Matern32([0.3 * 10.0**d for d in range(dim)], 25.0)


def fitted_at_its_rows(engine: str, dim: int) -> HIPGPRegressor:
    """An engine of free points with one at every row, none of them learned: the exact GP."""
    X, truth, noise = wave(70, dim)
    X, y, new = X[:50], (truth + 2.0 * noise)[:50], X[50:]
    kernel = wave_kernel(dim)
    exact = HIPGPRegressor(kernel, engine="exact", noise=2.0, learn=False).fit(X, y)
    sparse = HIPGPRegressor(kernel, engine=engine, inducing=50, noise=2.0, learn=False).fit(X, y)
    mean, std = exact.predict(new, return_std=True)
    sparse_mean, sparse_std = sparse.predict(new, return_std=True)
    # A nugget of 1e-6 of the prior variance is all that lies between them.
    np.testing.assert_allclose(sparse_mean, mean, atol=1e-3 * std.mean())
    np.testing.assert_allclose(sparse_std, std, rtol=1e-3)
    assert sparse.elbo_ == pytest.approx(exact.log_evidence_, abs=1e-2)
    assert sparse.elbo_ <= exact.log_evidence_
    return sparse
