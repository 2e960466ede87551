import numpy as np
import pytest
import torch

from dustmap.linalg import CirculantOperator, ToeplitzOperator, fast_length, quadratic_forms
from dustmap.linalg._toeplitz import cropped_irfftn, padded_rfftn
from dustmap.linalg._toeplitz import toeplitz_bilinear_derivative as fast_derivative
from tests.references import (
    fft_circulant_product,
    half_spectrum,
    symmetric_column,
    toeplitz_bilinear_derivative,
    toeplitz_matrix,
    toeplitz_matrix_1d,
)

SHAPES = [(8,), (9,), (4, 6), (5, 4), (3, 4, 6), (4, 3, 5)]


def _is_7_smooth(n: int) -> bool:
    return all(p in (2, 3, 5, 7) for p in range(2, n + 1) if n % p == 0 and _is_prime(p))


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, n))


def test_fast_lengths_are_smooth_even_and_at_most_a_fifth_longer() -> None:
    for n in range(3, 400):
        length = fast_length(n)
        assert length >= n
        assert length % 2 == 0
        assert _is_7_smooth(length)
        assert length <= max(n + 2, 1.2 * n)
        assert fast_length(length) == length


def test_fast_length_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="n >= 1, got 0"):
        fast_length(0)


@pytest.mark.parametrize("torus", SHAPES)
def test_product_equals_the_complex_fft(torus: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    column, x = symmetric_column(torus, rng), rng.standard_normal(torus)
    operator = CirculantOperator(torch.from_numpy(half_spectrum(column)), torus)
    product = operator.matmul(torch.from_numpy(x).reshape(-1)).numpy()
    np.testing.assert_allclose(product, fft_circulant_product(column, x).ravel(), atol=1e-12)


@pytest.mark.parametrize("torus", SHAPES)
def test_padded_and_cropped_transforms_equal_the_whole_ones(torus: tuple[int, ...]) -> None:
    box = tuple(m - 1 for m in torus)
    axes = tuple(range(1, len(torus) + 1))
    x = torch.randn(2, *box, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spectrum = torch.fft.rfftn(x, s=torus, dim=axes)
    rotated = spectrum.movedim(1, -1)
    torch.testing.assert_close(padded_rfftn(x, torus), rotated, rtol=1e-12, atol=1e-12)
    crop = (slice(None), *(slice(m) for m in box))
    whole = torch.fft.irfftn(spectrum, s=torus, dim=axes)[crop]
    block = cropped_irfftn(rotated, torus, box)
    torch.testing.assert_close(block, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("torus", "box"), [((2**17,), (1000,)), ((40, 40, 48), (20, 20, 20))])
def test_a_batch_larger_than_the_cache_equals_its_rows(
    torus: tuple[int, ...], box: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    column = torch.from_numpy(symmetric_column(torus, np.random.default_rng(0)))
    operator = CirculantOperator(torch.fft.rfftn(column).real, torus, box, box)
    x = torch.randn(40, operator.shape[1], dtype=torch.float64, generator=generator)
    rows = torch.stack([operator.matmul(row) for row in x])
    torch.testing.assert_close(operator.matmul(x), rows, rtol=1e-12, atol=1e-12)


def test_computes_in_the_precision_of_the_vector() -> None:
    column = symmetric_column((12,), np.random.default_rng(0))
    operator = CirculantOperator(torch.from_numpy(half_spectrum(column)), (12,))
    x = torch.ones(12)
    assert operator.matmul(x).dtype == torch.float32
    assert torch.equal(operator.matmul(x), operator.to(torch.float32).matmul(x))
    assert operator.to(torch.float32).dtype == torch.float32


def test_a_vector_wider_than_the_spectrum_is_an_error() -> None:
    operator = CirculantOperator(torch.ones(5), (8,))
    with pytest.raises(ValueError, match=r"no wider than the spectrum's torch.float32"):
        operator.matmul(torch.ones(8, dtype=torch.float64))


def test_wrong_spectrum_names_the_expected_shape() -> None:
    with pytest.raises(ValueError, match=r"real of shape \(4, 4\) .* got .* shape \(4, 6\)"):
        CirculantOperator(torch.ones(4, 6), (4, 6))


def test_box_outside_the_torus_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"rows must be a box inside the torus \(8,\), got \(9,\)"):
        CirculantOperator(torch.ones(5), (8,), rows=(9,))


def test_toeplitz_equals_scipy_in_one_dimension() -> None:
    lags = np.random.default_rng(0).standard_normal(11)
    dense = ToeplitzOperator(torch.from_numpy(lags)).to_dense().numpy()
    np.testing.assert_allclose(dense, toeplitz_matrix_1d(lags), atol=1e-12)


@pytest.mark.parametrize("shape", [(12,), (6, 6), (4, 4, 3)])
def test_indefinite_embedding_still_gives_exact_products(shape: tuple[int, ...]) -> None:
    """A squared exponential long against the box: the minimal circulant is indefinite."""
    axes = [np.exp(-0.5 * (np.arange(m) / (0.7 * m)) ** 2) for m in shape]
    lags = axes[0]
    for axis in axes[1:]:
        lags = np.multiply.outer(lags, axis)
    operator = ToeplitzOperator(torch.from_numpy(lags))
    assert float(operator.circulant.spectrum.min()) < -1e-4
    K = toeplitz_matrix(lags)
    assert np.linalg.eigvalsh(K).min() > -1e-12
    np.testing.assert_allclose(operator.to_dense().numpy(), K, atol=1e-13)


@pytest.mark.parametrize("shape", [(1,), (2,), (9,), (5, 4), (1, 6), (3, 4, 2)])
def test_bilinear_derivative_equals_the_double_loop(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    n = int(np.prod(shape))
    a, b = rng.standard_normal((3, n)), rng.standard_normal((3, n))
    derivative = fast_derivative(torch.from_numpy(a), torch.from_numpy(b), shape).numpy()
    expected = sum(toeplitz_bilinear_derivative(u, v, shape) for u, v in zip(a, b, strict=True))
    np.testing.assert_allclose(derivative, expected, atol=1e-12)


def test_bilinear_derivative_refuses_different_batches() -> None:
    with pytest.raises(ValueError, match=r"b: expected the shape of a \(2, 4\), got \(3, 4\)"):
        fast_derivative(torch.ones(2, 4), torch.ones(3, 4), (4,))


def test_float32_toeplitz_rounds_the_spectrum_and_not_the_lags() -> None:
    """The smallest eigenvalue of a smooth covariance lies far below the rounding of its lags."""
    lags = torch.exp(-0.5 * (torch.arange(64, dtype=torch.float64) / 2.0) ** 2)
    exact = ToeplitzOperator(lags).circulant.spectrum
    rounded = ToeplitzOperator(lags).to(torch.float32).circulant.spectrum
    torch.testing.assert_close(rounded.double(), exact, rtol=1e-7, atol=0.0)


def test_toeplitz_refuses_integers() -> None:
    with pytest.raises(ValueError, match=r"lags must be a real floating-point .* got torch.int64"):
        ToeplitzOperator(torch.arange(4))


@pytest.mark.parametrize("torus", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quadratic_forms_are_those_of_products(torus: tuple[int, ...], dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    box = tuple(length - 1 for length in torus)
    spectra = [torch.from_numpy(half_spectrum(symmetric_column(torus, rng))) for _ in range(3)]
    operators = [CirculantOperator(each, torus, box, box) for each in spectra]
    x = torch.from_numpy(rng.standard_normal((4, int(np.prod(box)))))
    expected = torch.stack([(x * C.matmul(x)).sum(-1) for C in operators])
    found = quadratic_forms([C.to(dtype) for C in operators], x.to(dtype))
    assert found.dtype == torch.float64
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 10)
    whole = CirculantOperator(spectra[0], torus)
    y = torch.from_numpy(rng.standard_normal((2, int(np.prod(torus)))))
    torch.testing.assert_close(quadratic_forms([whole], y)[0], (y * whole.matmul(y)).sum(-1))
    assert quadratic_forms(operators, x[:0]).shape == (3, 0)
