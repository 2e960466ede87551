"""The mean of a log-normal fit: it follows its samples to where their energy is least."""

import pytest

from dustmap.gp import ConstantMean
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import MGVISettings, fit_mgvi
from dustmap.inference.lognormal._lognormal_descent import Accuracy, descend_samples
from dustmap.inference.lognormal._lognormal_energy import Iterate
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from tests.inference.test_mgvi import box, draw_truth, model_of, observe, positions

#: Nats that are left to gain: a third of a posterior standard deviation in any one direction.
LEFT = 0.3
EXACT = Accuracy(residual=1e-3, decrease=1e-6, steps=60, cg_steps=500)


@pytest.mark.parametrize(("dim", "seed"), [(1, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("learn", [False, True])
def test_the_mean_rests_at_the_least_energy_of_the_samples(
    dim: int, seed: int, learn: bool
) -> None:
    """E(ξ̄) = mean_s ½ ‖y − L ρ(ξ̄ + δ_s)‖²_{Σ⁻¹} + ½ ‖ξ̄‖² at the δ_s that are returned."""
    noise = GaussianLikelihood(learn=False)
    model = model_of(
        box(dim, {1: 65, 2: 17, 3: 9}[dim]),
        length=0.2,
        variance=2.0,
        mean=ConstantMean(0.0),
        likelihood=noise,
        learn=learn,
    )
    data = observe(model, draw_truth(model, seed), positions(400, dim, seed), 0.1, seed)
    solution = fit_mgvi(model, data, MGVISettings(samples=8, curved=True))
    problem = LogNormalProblem.of(solution.model, data, None)
    here = Iterate.at(problem, solution.xi, solution.deviations)
    least = descend_samples([here], EXACT)[0].iterate
    assert 0.0 <= here.energy - least.energy < LEFT
