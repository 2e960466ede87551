"""Slow, obvious references shared by the tests. Nothing here comes from dustmap."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

Array = NDArray[np.float64]


def grid_indices(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Multi-indices of a grid in C order."""
    return list(itertools.product(*(range(m) for m in shape)))


def toeplitz_matrix(lags: Array) -> Array:
    """K_ij = lags[|i₁−j₁|, …, |i_D−j_D|] by a double loop over the grid."""
    points = grid_indices(lags.shape)
    K = np.empty((len(points), len(points)))
    for row, i in enumerate(points):
        for column, j in enumerate(points):
            K[row, column] = lags[tuple(abs(a - b) for a, b in zip(i, j, strict=True))]
    return K


def toeplitz_matrix_1d(lags: Array) -> Array:
    """Second oracle for one axis: scipy's."""
    return np.asarray(scipy.linalg.toeplitz(lags), dtype=np.float64)


def toeplitz_bilinear_derivative(a: Array, b: Array, shape: Sequence[int]) -> Array:
    """∂(aᵀ K b)/∂lags by a double loop: a_i b_j lands on the lag |i − j|."""
    points = grid_indices(shape)
    derivative = np.zeros(tuple(shape))
    for row, i in enumerate(points):
        for column, j in enumerate(points):
            lag = tuple(abs(p - q) for p, q in zip(i, j, strict=True))
            derivative[lag] += a[row] * b[column]
    return derivative


def circulant_matrix(first_column: Array) -> Array:
    """C_ij = c[(i − j) mod L] by a double loop over the torus."""
    shape = first_column.shape
    points = grid_indices(shape)
    C = np.empty((len(points), len(points)))
    for row, i in enumerate(points):
        for column, j in enumerate(points):
            offset = tuple((p - q) % m for p, q, m in zip(i, j, shape, strict=True))
            C[row, column] = first_column[offset]
    return C


def symmetric_column(shape: Sequence[int], rng: np.random.Generator) -> Array:
    """A random first column with c(j) = c(−j), so that its spectrum is real."""
    column = rng.standard_normal(tuple(shape))
    mirrored = column[np.ix_(*((-np.arange(m)) % m for m in shape))]
    return np.asarray(0.5 * (column + mirrored), dtype=np.float64)


def half_spectrum(first_column: Array) -> Array:
    """Real half spectrum λ of a symmetric first column, by numpy's FFT."""
    return np.asarray(np.fft.rfftn(first_column).real, dtype=np.float64)


def fft_circulant_product(first_column: Array, x: Array) -> Array:
    """C x for x of the torus' shape: numpy's complex FFT, the second oracle."""
    product = np.fft.ifftn(np.fft.fftn(first_column) * np.fft.fftn(x)).real
    return np.asarray(product, dtype=np.float64)


def leading_block(
    matrix: Array, torus_shape: Sequence[int], rows: Sequence[int], columns: Sequence[int]
) -> Array:
    """Rows and columns of a torus matrix that lie in leading boxes of the torus."""
    points = grid_indices(torus_shape)

    def inside(box: Sequence[int]) -> list[int]:
        return [k for k, p in enumerate(points) if all(a < m for a, m in zip(p, box, strict=True))]

    return matrix[np.ix_(inside(rows), inside(columns))]


@dataclass(frozen=True)
class GaussianPosterior:
    """mean (N*,), covariance (N*, N*), and the log evidence of the data."""

    mean: Array
    covariance: Array
    log_evidence: float


def cholesky_gp(
    K: Array, K_star: Array, K_star_star: Array, y: Array, noise_variance: Array
) -> GaussianPosterior:
    """Exact GP: K (N, N), K_star (N*, N), K_star_star (N*, N*), y (N,), noise_variance (N,)."""
    L = np.linalg.cholesky(K + np.diag(noise_variance))
    alpha = scipy.linalg.cho_solve((L, True), y)
    V = scipy.linalg.solve_triangular(L, K_star.T, lower=True)
    log_evidence = -0.5 * y @ alpha - np.log(np.diag(L)).sum() - 0.5 * len(y) * np.log(2 * np.pi)
    return GaussianPosterior(K_star @ alpha, K_star_star - V.T @ V, float(log_evidence))


def integrate(f: Callable[[Array], Array], a: float, b: float, nodes: int = 200) -> float:
    """∫_a^b f by Gauss–Legendre."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    half = 0.5 * (b - a)
    return float(half * np.sum(w * f(a + half * (x + 1.0))))


def ray_point_covariance(
    k: Callable[[Array], Array],
    start: Array,
    end: Array,
    point: Array,
    weight: Callable[[Array], Array] = np.ones_like,
    nodes: int = 200,
) -> float:
    """∫ w(s) k(start + s·direction − point) ds for k of displacements (..., D)."""
    length = float(np.linalg.norm(end - start))
    direction = (end - start) / length

    def integrand(s: Array) -> Array:
        return weight(s) * k(start + s[:, None] * direction - point)

    return integrate(integrand, 0.0, length, nodes)


def ray_ray_covariance(
    k: Callable[[Array], Array],
    first: tuple[Array, Array],
    second: tuple[Array, Array],
    nodes: int = 200,
) -> float:
    """∬ k(x(s) − x'(t)) ds dt over two segments (start, end), by a tensor rule.

    Where the segments coincide k has a kink on the diagonal; use `ray_variance` there.
    """
    start, end = second
    length = float(np.linalg.norm(end - start))
    direction = (end - start) / length

    def inner(t: Array) -> Array:
        return np.array([ray_point_covariance(k, *first, start + u * direction) for u in t])

    return integrate(inner, 0.0, length, nodes)


def ray_variance(k_of_distance: Callable[[Array], Array], length: float) -> float:
    """∬ k(|s − t|) ds dt = 2 ∫₀^d (d − t) k(t) dt."""
    return 2.0 * integrate(lambda t: (length - t) * k_of_distance(t), 0.0, length)
