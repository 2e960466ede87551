"""Normal and Student-t distributions convolved, against sums over a dense grid of the field."""

import math

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor

from dustmap.gp.likelihoods import NormalMixture, StudentTLikelihood


def dense(residual: float, variance: float, nu: float) -> float:
    """ln ∫ t_ν(r − f) N(f; 0, v) df by 400,000 places that crowd about both peaks."""
    reach = 2.0 * abs(residual) + 40.0 * math.sqrt(variance) + 40.0
    t = np.linspace(-1.0, 1.0, 100_001) * math.asinh(reach / 1e-2)
    near = 1e-2 * np.sinh(t)
    between = residual * np.linspace(0.0, 1.0, 200_001)
    f = np.unique(np.concatenate([near * min(1.0, math.sqrt(variance)), residual + near, between]))
    constant = special.gammaln(0.5 * (nu + 1)) - special.gammaln(0.5 * nu)
    constant -= 0.5 * math.log(math.pi * nu) + 0.5 * math.log(2 * math.pi * variance)
    log_integrand = -0.5 * (nu + 1) * np.log1p((residual - f) ** 2 / nu) - 0.5 * f**2 / variance
    top = float(log_integrand.max())
    return float(constant) + top + math.log(np.trapezoid(np.exp(log_integrand - top), f))


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize("nu", [1.0, 2.2, 4.0, 100.0])
@pytest.mark.parametrize("variance", [1e-4, 1.0, 1e4])
def test_log_densities_are_the_convolution_however_far_out(nu: float, variance: float) -> None:
    for sigmas in (0.0, 1.0, 6.0, 30.0, 1e3, 1e5):
        residual = sigmas * math.sqrt(1.0 + variance)
        expected = dense(residual, variance, nu)
        mixture = NormalMixture.student_t(
            one(residual), one(0.0), one(variance), one(1.0), torch.tensor(nu, dtype=torch.float64)
        )
        assert float(mixture.log_density(one(residual))) == pytest.approx(expected, abs=3e-5)
        if nu > 2.0:
            likelihood = StudentTLikelihood(nu, learn=False)
            found = likelihood.log_predictive_density(
                one(residual), one(0.0), one(variance), one(1.0)
            )
            assert float(found) == pytest.approx(expected, abs=3e-5)


@pytest.mark.parametrize("nu", [1.0, 4.0, 100.0])
def test_data_near_and_far_share_their_nodes(nu: float) -> None:
    variance = torch.tensor([1e-4, 1.0, 1e4, 1.0, 1e-4], dtype=torch.float64)
    residual = torch.tensor([0.0, 1.0, 1e5, 30.0, 1e3], dtype=torch.float64)
    ones, dof = torch.ones_like(residual), torch.tensor(nu, dtype=torch.float64)
    mixture = NormalMixture.student_t(residual, 0.0 * ones, variance, ones, dof)
    expected = [dense(*each, nu) for each in zip(residual.tolist(), variance.tolist(), strict=True)]
    assert mixture.log_density(residual).tolist() == pytest.approx(expected, abs=3e-5)
