"""Quadratures of the inverse root against elliptic functions and their theory; spectrum bounds."""

import math

import mpmath
import pytest
import torch

from dustmap.linalg import (
    DenseOperator,
    DiagonalOperator,
    RootQuadrature,
    SpectrumBounds,
    ToeplitzOperator,
    largest_eigenvalue,
    spectrum_bounds,
)
from tests.linalg.root_cases import (
    SHAPES,
    matern_lags,
    with_spectrum,
)

CONDITIONS = [1e1, 1e3, 1e6, 1e9]


class TestQuadrature:
    @pytest.mark.parametrize("k", [0.9, 1e-1, 1e-3, 1e-5, 1e-7])
    def test_elliptic_functions(self, k: float) -> None:
        rule = RootQuadrature.of(SpectrumBounds(k**2, 1.0), 9)
        with mpmath.workdps(40):
            m = 1 - mpmath.mpf(k**2)
            period = mpmath.ellipk(m)
            for q, (shift, weight) in enumerate(zip(rule.shifts, rule.weights, strict=True)):
                v = (q + 0.5) * period / 9
                sc, cn, dn = (mpmath.ellipfun(name, v, m=m) for name in ("sc", "cn", "dn"))
                wanted = k**2 * sc**2, 2 * period / (9 * mpmath.pi) * k * dn / cn**2
                assert math.isclose(shift, float(wanted[0]), rel_tol=1e-14 + 1e-15 / k)
                assert math.isclose(weight, float(wanted[1]), rel_tol=1e-14 + 1e-15 / k)

    @pytest.mark.parametrize("condition", CONDITIONS)
    def test_error_falls_exponentially_at_the_rate_of_the_theorem(self, condition: float) -> None:
        bounds = SpectrumBounds(0.3, 0.3 * condition)
        rate = 2 * math.pi**2 / (math.log(condition) + 3)
        for nodes in (2, 4, 7, 10, 15, 20, 30):
            error = RootQuadrature.of(bounds, nodes).relative_error()
            assert error <= 20 * math.exp(-rate * nodes) + 1e-14
            assert error >= 1e-2 * math.exp(-1.1 * rate * nodes - 2) or nodes > 4

    @pytest.mark.parametrize(
        ("condition", "tolerance"),
        [(1e2, 1e-14), (1e4, 1e-9), (1e6, 1e-6), (1e8, 1e-5), (1e10, 1e-4)],
    )
    def test_fifteen_nodes(self, condition: float, tolerance: float) -> None:
        rule = RootQuadrature.of(SpectrumBounds(2.0 / condition, 2.0))
        assert rule.nodes == 15
        assert rule.relative_error() <= tolerance
        assert bool((rule.shifts.diff() > 0).all())
        assert bool((rule.weights > 0).all())

    def test_bounds_that_are_none_are_refused(self) -> None:
        for lowest, highest in ((0.0, 1.0), (2.0, 1.0), (-1.0, 1.0), (1.0, math.inf)):
            with pytest.raises(ValueError, match="expected 0 < lowest <= highest"):
                SpectrumBounds(lowest, highest)
        with pytest.raises(ValueError, match="at least one point"):
            RootQuadrature.of(SpectrumBounds(1.0, 2.0), 0)


class TestBounds:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_they_hold_the_spectrum(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        K = ToeplitzOperator(matern_lags(shape, 1.5), dtype)
        eigenvalues = torch.linalg.eigvalsh(K.to_dense().double())
        bounds = spectrum_bounds(K)
        assert float(eigenvalues[0]) / 100 < bounds.lowest <= float(eigenvalues[0])
        assert float(eigenvalues[-1]) <= bounds.highest < 1.1 * float(eigenvalues[-1])
        assert 0 < bounds.steps <= 100

    def test_a_floor_is_believed(self) -> None:
        K = DenseOperator(with_spectrum(torch.logspace(-8, 0, 30, dtype=torch.float64)))
        assert spectrum_bounds(K, floor=5e-9).lowest == 5e-9

    def test_the_identity_takes_one_step(self) -> None:
        bounds = spectrum_bounds(DiagonalOperator(torch.full((50,), 3.0, dtype=torch.float64)))
        assert bounds.steps == 1
        assert bounds.lowest <= 3.0 <= bounds.highest

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_largest_eigenvalue_is_bounded_closely(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        K = ToeplitzOperator(matern_lags(shape, 1.5), dtype)
        exact = float(torch.linalg.eigvalsh(K.to_dense().double())[-1])
        assert exact * (1 - 1e-6) <= largest_eigenvalue(K) <= 1.05 * exact

    def test_the_largest_eigenvalue_of_few_ones_is_exact(self) -> None:
        """A Krylov space ends once it holds every eigenvalue."""
        d = torch.tensor([0.0, 0.0, 2.0, 7.0, 7.0], dtype=torch.float64)
        assert largest_eigenvalue(DiagonalOperator(d)) == pytest.approx(7.0, rel=1e-14)
        assert largest_eigenvalue(DiagonalOperator(0 * d)) == 0.0
        with pytest.raises(ValueError, match="expected a square operator"):
            largest_eigenvalue(DenseOperator(torch.ones(3, 2)))

    def test_indefinite_operators_are_refused(self) -> None:
        d = torch.linspace(-0.1, 1.0, 40, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"not positive definite in torch\.float64: Lanczos"):
            spectrum_bounds(DiagonalOperator(d))
        with pytest.raises(ValueError, match="not positive definite"):
            spectrum_bounds(DiagonalOperator(torch.full((5,), math.nan)))
