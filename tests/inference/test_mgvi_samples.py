"""When straight deviations of a log-normal field leave the data."""

import math

import pytest
import torch

from dustmap.gp import Batch, ConstantMean
from dustmap.gp.functionals import PointValues
from dustmap.inference import MGVISettings, fit_mgvi
from dustmap.inference.lognormal import _mgvi_samples
from dustmap.inference.lognormal._lognormal_energy import Iterate, bends, excess_spread
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from tests.inference.test_mgvi import box, model_of
from tests.inference.test_seen_nodes import case


def at_the_prior(variance: float) -> Iterate:
    """One value at a node that says nothing: the deviations are those of the prior."""
    model = model_of(box(1, 9), variance=variance, mean=ConstantMean(0.0, learn=False))
    node = PointValues(torch.zeros(1, 1, dtype=torch.float64))
    problem = LogNormalProblem.of(
        model, Batch(node, torch.ones(1).double(), torch.ones(1).double())
    )
    xi = torch.zeros(problem.n_latent, dtype=torch.float64)
    return Iterate.at(problem, xi)


@pytest.mark.parametrize("variance", [0.05, 0.25])
def test_the_excess_of_a_log_normal_value_is_known(variance: float) -> None:
    """exp(δ) with δ ~ N(0, v) has the variance eᵛ (eᵛ − 1), the linear model v."""
    iterate = at_the_prior(variance)
    generator = torch.Generator().manual_seed(0)
    shape = (40_000, len(iterate.xi))
    white = torch.randn(shape, generator=generator, dtype=torch.float64)
    expected = math.sqrt(math.exp(variance) * math.expm1(variance) / variance) - 1.0
    assert excess_spread(iterate, white) == pytest.approx(expected, abs=0.02)
    # δ is scaled by 1/100, v by 1e-4: the response is linear.
    assert excess_spread(iterate, 0.01 * white) == pytest.approx(0.0, abs=1e-3)
    assert bends(iterate, white)
    assert not bends(iterate, 0.01 * white)


@pytest.mark.parametrize("curved", [pytest.param(False, marks=pytest.mark.slow), True])
def test_draws_of_many_data_are_exact_to_what_these_determine(
    curved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 data that determine ten numbers: variances of the responses are those of solves to the
    end within 3 %, where residuals for each datum alone leave them further away."""
    model, data = case(1, count=2000)

    def variance(residual: float) -> float:
        settings = MGVISettings(
            samples=64, curved=curved, residual=residual, rank=0, among_nodes=False
        )
        posterior = fit_mgvi(model, data, settings).posterior
        return float(posterior.predict(data.functional).variance.mean())

    exact = variance(1e-6)
    rough = 0.04 if curved else 0.025  # curved draws take several steps, and end closer
    assert abs(variance(rough) / exact - 1.0) < 0.03
    monkeypatch.setattr(_mgvi_samples, "_FINE", math.inf)
    assert variance(rough) / exact - 1.0 > 0.03
