"""The exact engine where hyperparameters are learned from a part of the data."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dustmap.engines import EvidenceSettings, ExactEngine, ExactSettings, Problem, Watch
from dustmap.gp import ConstantMean, ExactGP
from tests.contracts.engines import points, rays

#: Of 60 data.
_ENGINE = ExactEngine(ExactSettings(EvidenceSettings(rows=15, max_steps=3), 2**30))


@pytest.mark.parametrize("made", [points, rays])
def test_the_mean_is_of_all_data(made: Callable[[bool], Problem]) -> None:
    """β̂ = Hᵀ A⁻¹ y / Hᵀ A⁻¹ H of all data, at the learned hyperparameters."""
    problem = made(True)
    problem = replace(problem, model=replace(problem.model, mean=ConstantMean(0.5)))
    fit = _ENGINE.fit(problem, Watch())
    data, kernel = problem.data, fit.model.kernel
    noise = fit.model.likelihood.noise_variance(data)
    A = ExactGP(kernel, fit.model.mean).covariance(data.functional) + torch.diag(noise)
    h = data.functional.moments()[:, 0]
    weighed = torch.linalg.solve(A, h)
    expected = (weighed @ data.y) / (weighed @ h)
    torch.testing.assert_close(fit.model.mean.coefficients()[0], expected, rtol=1e-8, atol=1e-10)
    loaded = _ENGINE.load(replace(problem, model=fit.model), fit.arrays)
    assert torch.equal(
        loaded.posterior.predict(data.functional).mean, fit.posterior.predict(data.functional).mean
    )
