"""The references against second, independent oracles."""

import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from tests import references as ref

TORI = [(5,), (4, 3), (2, 3, 4)]


def _squared_exponential(x: ref.Array) -> ref.Array:
    return np.asarray(np.exp(-0.5 * np.sum(x**2, axis=-1)), dtype=np.float64)


def _matern32(r: ref.Array) -> ref.Array:
    return np.asarray((1.0 + np.sqrt(3.0) * r) * np.exp(-np.sqrt(3.0) * r), dtype=np.float64)


@pytest.mark.parametrize("torus", TORI)
def test_circulant_matrix_equals_the_fft(torus: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    column, x = ref.symmetric_column(torus, rng), rng.standard_normal(torus)
    product = ref.circulant_matrix(column) @ x.ravel()
    np.testing.assert_allclose(product, ref.fft_circulant_product(column, x).ravel(), atol=1e-12)


def test_toeplitz_matrix_equals_scipy() -> None:
    lags = np.random.default_rng(0).standard_normal(6)
    np.testing.assert_array_equal(ref.toeplitz_matrix(lags), ref.toeplitz_matrix_1d(lags))


def test_bilinear_derivative_is_linear_in_the_lags() -> None:
    """aᵀ K b = Σ_ℓ lags[ℓ] ∂(aᵀ K b)/∂lags[ℓ]."""
    rng = np.random.default_rng(0)
    lags, a, b = rng.standard_normal((3, 4)), rng.standard_normal(12), rng.standard_normal(12)
    form = a @ ref.toeplitz_matrix(lags) @ b
    derivative = ref.toeplitz_bilinear_derivative(a, b, lags.shape)
    assert np.sum(lags * derivative) == pytest.approx(form, rel=1e-12)


def test_log_evidence_equals_scipy() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(6, 2))
    K = _squared_exponential(x[:, None] - x[None])
    y, noise = rng.standard_normal(6), rng.uniform(0.1, 0.5, 6)
    posterior = ref.cholesky_gp(K, K, K, y, noise)
    expected = scipy.stats.multivariate_normal(np.zeros(6), K + np.diag(noise)).logpdf(y)
    assert posterior.log_evidence == pytest.approx(float(expected), rel=1e-10)
    gain = K @ np.linalg.inv(K + np.diag(noise))
    np.testing.assert_allclose(posterior.mean, gain @ y, rtol=1e-10)
    np.testing.assert_allclose(posterior.covariance, K - gain @ K, atol=1e-12)


def test_ray_point_covariance_equals_adaptive_quadrature() -> None:
    start, end = np.array([0.0, 0.2, 0.1]), np.array([1.0, 1.5, -0.4])
    point = np.array([0.4, 0.3, 0.3])
    length = float(np.linalg.norm(end - start))
    value = ref.ray_point_covariance(_squared_exponential, start, end, point, lambda s: s**2)

    def integrand(s: float) -> float:
        place = start + s * (end - start) / length
        return s**2 * float(_squared_exponential(place - point))

    expected, _ = scipy.integrate.quad(integrand, 0.0, length, epsabs=1e-13)
    assert value == pytest.approx(expected, rel=1e-11)


def test_ray_variance_equals_the_double_integral() -> None:
    start, end = np.zeros(2), np.array([0.6, 0.8])
    double = ref.ray_ray_covariance(_squared_exponential, (start, end), (start, end), 40)
    single = ref.ray_variance(lambda t: np.exp(-0.5 * t**2), 1.0)
    assert single == pytest.approx(double, rel=1e-12)


def test_ray_variance_of_a_kernel_with_a_kink() -> None:
    expected, _ = scipy.integrate.quad(
        lambda t: 2.0 * (2.0 - t) * float(_matern32(np.array(t))), 0.0, 2.0, epsabs=1e-13
    )
    assert ref.ray_variance(_matern32, 2.0) == pytest.approx(expected, rel=1e-12)
