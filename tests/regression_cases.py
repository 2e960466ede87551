"""What the tests of regression share."""

import numpy as np
from numpy.typing import NDArray

from dustmap.gp.kernels import AbstractKernel, Matern32

Array = NDArray[np.float64]


ENGINES = ("exact", "hip", "global")


def wave(n: int, dim: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Inputs on axes of unlike units, the noise-free target, and noise of standard deviation 1."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(n, dim))
    phase = 6.0 * X[:, 0] + sum(2.0 * X[:, d] for d in range(1, dim))
    truth = 1000.0 + 10.0 * np.sin(phase)
    return X * 10.0 ** np.arange(dim) + 50.0, truth, rng.standard_normal(n)


def wave_kernel(dim: int) -> AbstractKernel:
    """A prior that suits `wave`."""
    return Matern32([0.3 * 10.0**d for d in range(dim)], 25.0)
