"""The predictive density of Student-t noise beside adaptive quadrature, at all widths."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, special

from dustmap.gp.likelihoods import NormalMixture, StudentTLikelihood


def reference(residual: float, std: float, nu: float) -> float:
    """ln ∫ t_ν(r − f) N(f; 0, v) df by adaptive Gauss-Kronrod between the places where either
    factor bends; the integrand is taken relative to its largest value."""
    constant = special.gammaln(0.5 * (nu + 1)) - special.gammaln(0.5 * nu)
    constant -= 0.5 * math.log(math.pi * nu) + 0.5 * math.log(2 * math.pi) + math.log(std)

    def log_integrand(f: float) -> float:
        tail = -0.5 * (nu + 1) * math.log1p((residual - f) ** 2 / nu)
        return tail - 0.5 * (f / std) ** 2

    reaches = np.concatenate([[0.0], 10.0 ** np.arange(-2.0, 5.0, 0.25)])
    cuts = {c + sign * w for c in (0.0, residual) for sign in (1, -1) for w in reaches}
    cuts |= {sign * w * std for sign in (1, -1) for w in reaches}
    cuts |= set(np.linspace(0.0, residual, 41))
    places = sorted(c for c in cuts if abs(c) <= 40.0 * std + 2.0 * residual + 1e3)
    fine = np.concatenate([np.linspace(a, b, 9) for a, b in itertools.pairwise(places)])
    top = max(map(log_integrand, fine))
    parts = [
        integrate.quad(lambda f: math.exp(log_integrand(f) - top), a, b, limit=100)[0]
        for a, b in itertools.pairwise(places)
    ]
    return float(constant + top + math.log(math.fsum(parts)))


@pytest.mark.parametrize("nu", [1.5, 2.3, 4.0, 30.0, 1e3])
@pytest.mark.parametrize("std", [1e-3, 1.0, 30.0, 1e3])
def test_log_densities_far_out_are_the_integral_in_either_precision(nu: float, std: float) -> None:
    residuals = [0.0, 1.0, 30.0, 1e3, 1e4]
    expected = [reference(residual, std, nu) for residual in residuals]
    for dtype in (torch.float64, torch.float32):
        y = torch.tensor(residuals, dtype=dtype)
        mean, ones = torch.zeros_like(y), torch.ones_like(y)
        dof = torch.tensor(nu, dtype=torch.float64)
        mixture = NormalMixture.student_t(y, mean, std**2 * ones, ones, dof)
        np.testing.assert_allclose(mixture.log_density(y).numpy(), expected, atol=0.01)
        if nu > 2.0:
            likelihood = StudentTLikelihood(nu, learn=False)
            found = likelihood.log_predictive_density(y, mean, std**2 * ones, ones)
            np.testing.assert_allclose(found.detach().numpy(), expected, atol=0.01)
