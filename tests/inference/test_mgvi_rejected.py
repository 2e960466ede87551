"""Evidence steps of a log-normal fit that leave the data, and samples that overflow."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dustmap.gp import Batch, ConstantMean
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import LogNormalModel, MGVISettings, MGVIStatus, fit_mgvi
from dustmap.inference.lognormal import _mgvi_hyper, _mgvi_phases, _mgvi_samples
from dustmap.inference.lognormal._lognormal import typical_log_density
from dustmap.inference.lognormal._lognormal_descent import Accuracy
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from dustmap.inference.lognormal._mgvi_curves import Centres, curved_draws
from dustmap.inference.lognormal._mgvi_hyper import EvidenceStep
from dustmap.inference.lognormal._mgvi_state import posterior_at
from tests.inference.test_mgvi import box, draw_truth, model_of, observe, positions

SETTINGS = MGVISettings(samples=4, draws=4, rounds=4, refinements=1, curved=False)
Step = Callable[..., EvidenceStep]


def case(dim: int) -> tuple[LogNormalModel, Batch]:
    nodes = {1: 16, 3: 6}[dim]
    truth = model_of(box(dim, nodes), length=0.4)
    data = observe(truth, draw_truth(truth, 0), positions(60, dim, 0), 0.05, 0)
    model = model_of(
        box(dim, nodes),
        length=0.4,
        mean=ConstantMean(typical_log_density(data, 1.0)),
        likelihood=GaussianLikelihood(1.0),
    )
    return model, data


def pushed(push: tuple[float, ...]) -> Step:
    """The evidence step with Δθ = push in place of Newton's."""

    def step(*arguments: Any) -> EvidenceStep:
        return replace(_evidence_step(*arguments), delta=torch.tensor(push, dtype=torch.float64))

    return step


_evidence_step = _mgvi_hyper.evidence_step


@pytest.mark.parametrize("dim", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("push", [(0.0, 0.0, -40.0), (0.0, math.inf, 0.0)])
def test_a_step_that_leaves_the_data_is_not_taken(
    dim: int, push: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_mgvi_phases, "evidence_step", pushed(push))
    model, data = case(dim)
    before = model.learned().theta
    solution = fit_mgvi(model, data, SETTINGS)
    torch.testing.assert_close(solution.model.learned().theta, before, rtol=0, atol=0)
    same = (each.covariance_products().to_dense() for each in (solution.model.prior, model.prior))
    torch.testing.assert_close(*same, rtol=0, atol=0)
    assert solution.rejected_steps == sum(entry.stage == "rejected" for entry in solution.history)
    assert solution.rejected_steps > 0
    assert "evidence" not in [entry.stage for entry in solution.history]
    assert solution.status is MGVIStatus.REJECTED
    assert "Student-t" in solution.message()
    # The map is that of the parameters where the fit stayed.
    model, _ = case(dim)
    model = model.learning("mean")
    fixed = fit_mgvi(model, data, SETTINGS)
    distance = solution.posterior.log_density - fixed.posterior.log_density
    spread = fixed.posterior.node_log_moments()[1]
    assert float((distance / spread).square().mean().sqrt()) < 0.1


def test_a_step_that_is_too_long_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    # The noise e^-2 times smaller: misfits 7 times larger; at a quarter, 1.6 times.
    monkeypatch.setattr(_mgvi_phases, "evidence_step", pushed((0.0, 0.0, -2.0)))
    model, data = case(1)
    solution = fit_mgvi(model, data, replace(SETTINGS, rounds=1))
    assert solution.rejected_steps == 0
    assert -1.5 < float(solution.model.learned().theta[2]) < 0.0


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 3])
def test_outliers_do_not_blow_up_the_learning(dim: int) -> None:
    """Where the mode is far from its rest, the optimum of its linearisation leaves the data."""
    seed, stars, nodes = (1, 100, 40) if dim == 1 else (0, 200, 6)
    truth = model_of(box(dim, nodes), length=0.3)
    data = observe(truth, draw_truth(truth, seed), positions(stars, dim, seed), 0.1, seed)
    generator = torch.Generator().manual_seed(seed)
    outlier = torch.rand(stars, generator=generator) < 0.02
    off = 300 * torch.randn(stars, generator=generator, dtype=torch.float64)
    assert data.noise_variance is not None
    data = replace(data, y=data.y + outlier * off * data.noise_variance.sqrt())
    model = model_of(
        box(dim, nodes),
        length=0.3,
        mean=ConstantMean(typical_log_density(data, 1.0)),
        likelihood=GaussianLikelihood(1.0),
        dtype=torch.float32,
    )
    solution = fit_mgvi(model, data, MGVISettings(samples=4, refinements=1))
    assert all(math.isfinite(entry.energy) for entry in solution.history)
    assert solution.posterior.log_samples.isfinite().all()
    lowest = math.inf
    for entry in solution.history:
        if entry.stage in ("mode", "evidence", "rejected"):
            assert entry.energy < 2 * lowest
            lowest = min(lowest, entry.energy)


def test_curved_draws_start_over_where_straight_ones_overflow() -> None:
    model, data = case(1)
    problem = LogNormalProblem.of(model, data)
    n = problem.n_latent
    mean = posterior_at(problem, torch.zeros(n, dtype=torch.float64))
    white, noise = torch.zeros(1, n).double(), torch.zeros(1, len(data)).double()
    far = torch.full_like(white, 1e6)
    assert not posterior_at(problem, far[0]).is_finite
    centre = Centres(problem, mean.xi, mean.log_density)
    found = curved_draws(centre, white, noise, far, noise, Accuracy(0.1, 1e-3, 5), None)
    torch.testing.assert_close(found.xi[0], mean.xi, rtol=0, atol=1e-6)


def test_samples_that_overflow_leave_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def huge(*arguments: Any, **named: Any) -> Any:
        straight, solve = _metric_draws(*arguments, **named)
        return straight.mul_(1e6), solve

    monkeypatch.setattr(_mgvi_samples, "metric_draws", huge)
    model, data = case(1)
    solution = fit_mgvi(model, data, replace(SETTINGS, rounds=1, curved=False))
    assert solution.status is MGVIStatus.STRAYED
    assert solution.posterior.log_density.isfinite().all()
    assert solution.history[-1].misfit < 2.0


_metric_draws = _mgvi_samples.metric_draws
