"""Minibatches and learning: stochastic variational inference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import ConstantMean, Parameters, gradient_at
from dustmap.gp.likelihoods import GaussianLikelihood, PoissonLikelihood
from dustmap.inference import (
    RowSource,
    SVISettings,
    VariationalModel,
    batch_stability,
    fit_svi,
    full_elbo,
    solve_direct,
    svi,
    unsettled,
)
from dustmap.linalg import DenseOperator
from tests.inference.variational_cases import families, make_problem


@pytest.mark.parametrize("family", ["mean-field", "block", "full"])
def test_minibatch_svi_approaches_the_direct_optimum(family: str) -> None:
    problem = make_problem((5, 4), noise=1.0)
    model = problem.model(families(problem)[family])
    optimum = solve_direct(model, problem.batch, problem.source, rtol=1e-12).elbo
    settings = SVISettings(batch_size=10, epochs=60)
    generator = torch.Generator().manual_seed(0)
    first = next(svi(model, problem.batch, problem.source, settings, generator))
    last = fit_svi(model, problem.batch, problem.source, settings, generator)
    start = full_elbo(model, first.posterior, problem.batch, problem.source)
    end = full_elbo(model, last.posterior, problem.batch, problem.source)
    assert start < end <= optimum
    assert optimum - end < 0.1 * (optimum - start) + 0.05


@pytest.mark.parametrize("family", ["mean-field", "block", "full"])
def test_the_covariance_of_gaussian_noise_stays_the_optimum(family: str) -> None:
    problem = make_problem((5, 4))
    model = problem.model(families(problem)[family])
    optimum = solve_direct(model, problem.batch, problem.source).state
    settings, generator = SVISettings(batch_size=7, epochs=2), torch.Generator().manual_seed(0)
    last = fit_svi(model, problem.batch, problem.source, settings, generator).posterior
    assert torch.equal(last.statistics, optimum.statistics)


@pytest.mark.parametrize("family", ["mean-field", "block", "full"])
def test_steps_stand_unequal_errors(family: str) -> None:
    """A few data of errors 300 times smaller than the others': blocks went to 1e20 here."""
    problem = make_problem((5, 4), noise=1.0)
    variance = torch.where(torch.arange(len(problem.batch)) % 10 == 0, 1.0 / 300**2, 1.0).double()
    batch = replace(problem.batch, noise_variance=variance)
    model = problem.model(families(problem)[family])
    settings, generator = SVISettings(batch_size=10, epochs=60), torch.Generator().manual_seed(0)
    first = model.family.prior(torch.float64)
    last = fit_svi(model, batch, problem.source, settings, generator).posterior
    optimum = solve_direct(model, batch, problem.source, rtol=1e-12).elbo
    start, end = (full_elbo(model, q, batch, problem.source) for q in (first, last))
    assert optimum - end < 0.02 * (optimum - start)


@pytest.mark.parametrize("family", ["mean-field", "block", "full"])
def test_what_is_left_of_the_gradient_is_the_error_of_the_mean(family: str) -> None:
    problem = make_problem((5, 4))
    model = problem.model(families(problem)[family])
    state = solve_direct(model, problem.batch, problem.source, rtol=1e-12).state
    assert unsettled(model, state, problem.batch, problem.source) < 1e-9
    shift = torch.randn(state.mean.shape, generator=torch.Generator().manual_seed(4)).double()
    left = unsettled(model, state.with_mean(state.mean + shift), problem.batch, problem.source)
    phi, _, sigma2 = problem.dense()
    g = shift + phi.mT @ ((phi @ shift) / sigma2)
    expected = (g @ state.apply_covariance(g) / len(g)).sqrt()
    assert left == pytest.approx(float(expected), rel=1e-8)


def test_seeds_decide_everything() -> None:
    problem = make_problem((5, 4))
    model = problem.model(families(problem)["block"])
    settings = SVISettings(batch_size=7, epochs=2)

    def run(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return fit_svi(model, problem.batch, problem.source, settings, generator).posterior.mean

    assert bool((run(1) == run(1)).all())
    assert not bool((run(1) == run(2)).all())


@pytest.mark.parametrize("family", ["mean-field", "block", "full"])
def test_stability_bounds_hold(family: str) -> None:
    problem = make_problem((5, 4), noise=0.01)
    phi, _, sigma2 = problem.dense()
    member = families(problem)[family]
    state = member.posterior(
        torch.zeros(phi.shape[1]).double(), member.precision_statistics(phi, 0.3 / sigma2)
    )
    Lambda = torch.eye(phi.shape[1]).double() + phi.mT @ (phi / sigma2[:, None])
    S = state.apply_covariance(torch.eye(phi.shape[1]).double())
    true = float(torch.linalg.eigvals(S @ Lambda).real.max())
    assert true <= batch_stability(state, DenseOperator(phi), 1 / sigma2) <= true + 1.0 + 1e-9


def test_early_stop_returns_the_best_held_out_state() -> None:
    problem = make_problem((5, 4))
    model = problem.model(families(problem)["mean-field"])
    scores = iter([1.0, 3.0, 2.0, 1.0, 0.0])
    settings = SVISettings(batch_size=16, epochs=50, patience=2)
    seen: list[int] = []
    best = fit_svi(
        model,
        problem.batch,
        problem.source,
        settings,
        torch.Generator().manual_seed(0),
        score=lambda state: next(scores),
        progress=lambda state: seen.append(state.epoch),
    )
    assert best.epoch == 2
    assert max(seen) == 4


def test_streamed_rows_give_the_stored_rows_result() -> None:
    problem = make_problem((5, 4))
    model = problem.model(families(problem)["block"])
    streamed = RowSource(problem.features, problem.batch.functional, memory=0)
    assert streamed.stored is None
    assert problem.source.stored is not None
    a = solve_direct(model, problem.batch, problem.source, rtol=1e-10)
    b = solve_direct(model, problem.batch, streamed, rtol=1e-10)
    torch.testing.assert_close(a.state.mean, b.state.mean, atol=1e-6, rtol=0)
    assert a.elbo == pytest.approx(b.elbo, abs=1e-5)


@pytest.mark.parametrize("name", ["hip", "hip-dense", "torus", "cholesky"])
def test_elbo_gradient_is_that_of_finite_differences(name: str) -> None:
    problem = make_problem((5, 4), name)
    member = families(problem)["block"]
    model = VariationalModel(
        problem.features, ConstantMean(0.2), GaussianLikelihood(scale=1.1, jitter=0.1), member
    )
    state = solve_direct(model, problem.batch, problem.source).state

    parameters = Parameters.of(model)
    assert len(parameters) == 5

    def value(theta: Tensor) -> Tensor:
        at = parameters.build(theta)
        rows = at.features.rows(problem.batch.functional)
        return at.expected_log_likelihood(state, rows, problem.batch) - state.kl()

    _, gradient = gradient_at(parameters.theta, value)
    for unit, slope in zip(torch.eye(5).double(), gradient, strict=True):
        sides = [float(value(parameters.theta + step * unit)) for step in (1e-5, -1e-5)]
        difference = (sides[0] - sides[1]) / 2e-5
        assert float(slope) == pytest.approx(difference, rel=2e-4, abs=1e-4)


def test_only_gaussian_noise_has_a_closed_form() -> None:
    problem = make_problem((5, 4), "cholesky")
    member = families(problem)["full"]
    model = VariationalModel(problem.features, ConstantMean(0.0), PoissonLikelihood(), member)
    with pytest.raises(TypeError, match=r"GaussianLikelihood.*PoissonLikelihood.*fit_svi"):
        solve_direct(model, problem.batch, problem.source)
