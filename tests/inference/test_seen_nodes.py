"""Solves among the nodes that data see against those from the side of the data, and dense ones."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, ZeroPoints
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    NO_CHECKPOINTS,
    AbstractCheckpointer,
    MGVISettings,
    MGVISolution,
    RobustSettings,
    fit_mgvi,
)
from dustmap.inference.lognormal import _mgvi_phases, _tangent
from dustmap.inference.lognormal._lognormal import LogNormalModel
from dustmap.inference.lognormal._lognormal_descent import Accuracy, descend
from dustmap.inference.lognormal._lognormal_energy import Iterate, draws_at_once
from dustmap.inference.lognormal._lognormal_problem import (
    LogNormalProblem,
    metric_solver,
    node_preconditioner,
)
from dustmap.inference.lognormal._mgvi_curves import Centres, curved_draws
from dustmap.inference.lognormal._mgvi_samples import (
    DrawSolver,
    Perturbations,
    answered,
    metric_draws,
    probed,
)
from dustmap.linalg import unwatched
from dustmap.linalg._chunks import PRODUCTS
from tests.combinations import covering
from tests.inference.checkpointers import often_interrupted
from tests.inference.test_mgvi import box, draw_truth, model_of, observe, positions

TIGHT = Accuracy(residual=1e-7, decrease=1e-9, steps=40, cg_steps=1000)


@pytest.fixture(autouse=True)
def _many_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small grids are seen whole: let G have all entries that it needs."""
    monkeypatch.setattr(_tangent, "_ENTRIES", 1e9)


def case(
    dim: int, count: int = 200, dtype: torch.dtype = torch.float64, learn: bool = False
) -> tuple[LogNormalModel, Batch]:
    """A small box of known hyperparameters and a learned mean, and more data than nodes."""
    grid = box(dim, {1: 16, 2: 6, 3: 4}[dim])
    noise = GaussianLikelihood(learn=False)
    model = model_of(grid, mean=ConstantMean(0.3), likelihood=noise, dtype=dtype, learn=learn)
    return model, observe(model, draw_truth(model, 1), positions(count, dim, 2), 0.05, 3)


def both_sides(model: LogNormalModel, data: Batch) -> tuple[LogNormalProblem, LogNormalProblem]:
    """The problem among nodes, and from the side of the data."""
    problem = LogNormalProblem.of(model, data)
    assert problem.nodes is not None
    return problem, replace(problem, nodes=None)


def densities_of(problem: LogNormalProblem, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    white = torch.randn(count, len(problem.log_mean), generator=generator, dtype=torch.float64)
    return (problem.log_mean + 0.5 * white.to(problem.y)).exp()


@pytest.mark.parametrize(
    ("robust", "rank", "dtype", "dim"),
    covering([False, True], [0, 10], [torch.float32, torch.float64], [1, 2, 3], together=2),
)
def test_steps_are_those_of_the_dense_matrix(
    dim: int, dtype: torch.dtype, rank: int, robust: bool
) -> None:
    """Jᵀ W^½ z of A z = b, under weights of Student-t noise too, at one density and at several."""
    problem, _ = both_sides(*case(dim, dtype=dtype))
    if robust:
        problem = problem.weighted(torch.linspace(0.1, 3.0, len(problem.y)))
    nodes = problem.nodes
    assert nodes is not None
    generator = torch.Generator().manual_seed(5)
    b = torch.randn(3, len(problem.y), generator=generator, dtype=torch.float64).to(dtype)
    rtol, near = (1e-9, 1e-7) if dtype == torch.float64 else (1e-3, 2e-2)
    densities = densities_of(problem, 3)
    at = problem.tangent(densities[0], b[0, :0])
    preconditioner = node_preconditioner(nodes, at, rank, None, unwatched) if rank else None
    stack = problem.tangent(densities, b[:, :0], problem.rows.matmul(densities))
    together = metric_solver(stack, preconditioner)(b, rtol=rtol, max_steps=500)
    pulls, _ = stack.pull_of(together.x)
    for s in range(3):
        tangent = problem.tangent(densities[s], b[s, :0])
        J = torch.stack([tangent.rmatmul(e) for e in torch.eye(len(b[0])).to(b)]).double()
        white = tangent.root_weights.double()[:, None] * J
        A = torch.eye(len(J), dtype=torch.float64) + white @ white.mT
        expected = white.mT @ torch.linalg.solve(A, b[s].double())
        solve = metric_solver(tangent, preconditioner)(b[s], rtol=rtol, max_steps=500)
        assert solve.converged
        atol = near * float(expected.abs().max())
        for step in (tangent.step_of(solve.x), problem.root.rmatmul(pulls[s])):
            torch.testing.assert_close(step.double(), expected, rtol=0.0, atol=atol)


def test_they_start_from_the_multipliers_of_another_density() -> None:
    problem, _ = both_sides(*case(2))
    b, densities = torch.ones(1, len(problem.y)).double(), densities_of(problem, 1)
    tangent = problem.tangent(densities[0], b[0, :0])
    cold = metric_solver(tangent, None)(b, rtol=1e-6, max_steps=500)
    near = problem.tangent(1.001 * densities[0], b[0, :0])
    warm = metric_solver(near, None)(b, x0=cold.x, rtol=1e-4, max_steps=500)
    anew = metric_solver(near, None)(b, rtol=1e-4, max_steps=500)
    assert int(warm.steps) < int(anew.steps)


@pytest.mark.parametrize("dim", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_mode_and_samples_are_those_of_the_data_side(dim: int) -> None:
    """Newton steps, straight draws, what these say of the data, and curved draws."""
    found = []
    for problem in both_sides(*case(dim)):
        xi = torch.zeros(problem.n_latent).to(problem.y)
        start = Iterate.at(problem, xi)
        mean = descend(start, problem.y.new_zeros(problem.n_multipliers), TIGHT)[0].iterate
        numbers = Perturbations.of(problem, 0, range(2))
        copy = Perturbations(numbers.white.clone(), numbers.noise)
        delta, solve = metric_draws(mean, copy, DrawSolver(1e-6, 1000, draws_at_once(2)))
        spread = answered(mean, numbers, solve.x)
        how = TIGHT, None, unwatched
        centre = Centres(problem, mean.xi, mean.log_density)
        curved = curved_draws(centre, numbers.white, numbers.noise, delta, solve.x, *how)
        found.append((mean.xi, delta, spread, curved.xi))
    for ours, theirs, near in zip(*found, (1e-4, 1e-4, 1e-4, 1e-3), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=near)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_residuals_without_a_datum_follow_from_its_leverage(dim: int) -> None:
    """1 − h_n of the draws is [A⁻¹]_nn, and at the mode of linear responses e_n/(1 − h_n) is what a
    fit without the datum leaves it."""
    for problem in both_sides(*case(dim)):
        n = len(problem.y)
        at = Iterate.at(problem, torch.zeros(problem.n_latent).to(problem.y))
        solver = DrawSolver(1e-6, 1000, draws_at_once(400))
        rest = probed(at, 0, 400, 400, solver, None).rest.double()
        tangent = problem.tangent(at.log_density.exp(), at.c)
        J = torch.stack([tangent.rmatmul(e) for e in torch.eye(n).to(problem.y)]).double()
        white = problem.noise.double().rsqrt()[:, None] * J
        inverse = torch.linalg.inv(torch.eye(n, dtype=torch.float64) + white @ white.mT)
        expected = inverse.diagonal()
        assert float((rest / expected - 1.0).abs().max()) < 5.0 * math.sqrt(2.0 / 400)
        y = torch.randn(n, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        others = torch.arange(n) != 3
        step = white[others].mT @ torch.linalg.solve(
            torch.eye(n - 1, dtype=torch.float64) + white[others] @ white[others].mT, y[others]
        )
        apart = (inverse @ y)[3] / expected[3]
        torch.testing.assert_close(apart, y[3] - white[3] @ step)


@pytest.mark.parametrize("robust", [None, RobustSettings(max_rounds=3)])
@pytest.mark.parametrize("curved", [False, True])
def test_a_fit_ends_where_that_of_the_data_does(
    curved: bool, robust: RobustSettings | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a tenth of a posterior standard deviation (rms), at which descents of curved samples
    end, and straight ones within a hundredth."""
    model, data = case(2)
    settings = MGVISettings(samples=8, curved=curved, residual=1e-7, robust=robust)
    ours = fit_mgvi(model, data, settings).posterior.log_samples
    monkeypatch.setattr(_tangent, "_ENTRIES", 0.0)
    theirs = fit_mgvi(model, data, settings).posterior.log_samples
    apart = ((ours - theirs) / theirs.std(0)).square().mean().sqrt()
    assert float(apart) < (0.1 if curved else 0.01)


@pytest.mark.parametrize("among_nodes", [False, True])
def test_a_resumed_fit_has_the_same_bits(among_nodes: bool) -> None:
    model, data = case(2)
    settings = MGVISettings(samples=8, curved=True, among_nodes=among_nodes)

    def fit(checkpointer: AbstractCheckpointer) -> MGVISolution:
        return fit_mgvi(model, data, settings, checkpointer=checkpointer)

    whole, resumed = fit(NO_CHECKPOINTS), often_interrupted(fit)
    assert torch.equal(whole.posterior.log_samples, resumed.posterior.log_samples)


def _easily_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every solve counts as slow, and the first preconditioner has rank 4."""
    for name, value in (("_RANK", 4), ("_SLOW", 0), ("QUICK", 0)):
        monkeypatch.setattr(_mgvi_phases, name, value)


def test_slow_solves_get_a_preconditioner_of_twice_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the most that there may be, from the side of the data, and the samples are those of
    none: within a hundredth of a posterior standard deviation (rms)."""
    model, data = case(2)
    settings = MGVISettings(samples=8, curved=False, residual=1e-7, most_rank=14, among_nodes=False)
    without = fit_mgvi(model, data, replace(settings, rank=0)).posterior.log_samples
    _easily_slow(monkeypatch)
    ranks: list[int] = []

    def watch(what: str, _: int, of: int) -> None:
        if what == PRODUCTS:
            ranks.append(of)

    grown = fit_mgvi(model, data, settings, progress=watch).posterior.log_samples
    assert sorted(ranks) == ranks
    assert {4, 8, 14} == set(ranks)
    assert float(((grown - without) / without.std(0)).square().mean().sqrt()) < 0.01


def test_a_resumed_fit_whose_preconditioner_grows_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _easily_slow(monkeypatch)
    test_a_resumed_fit_has_the_same_bits(among_nodes=False)


def test_where_they_are_not_made() -> None:
    """With fewer data than nodes, with numbers of groups, where hyperparameters are learned, and
    where memory lacks for them."""
    assert LogNormalProblem.of(*case(2, count=30)).nodes is None
    assert LogNormalProblem.of(*case(2), among_nodes=False).nodes is None
    assert LogNormalProblem.of(*case(2, learn=True)).nodes is None
    model, data = case(2)
    assert isinstance(data.functional, LineIntegrals)
    functional = replace(data.functional, groups=torch.arange(len(data)) % 3)
    grouped = Batch(functional, data.y, data.noise_variance)
    model = replace(model, zero_points=ZeroPoints(3, 0.1))
    assert LogNormalProblem.of(model, grouped).nodes is None


def test_sums_of_weights_are_made_when_the_noise_changes_alone() -> None:
    problem, _ = both_sides(*case(2))
    nodes = problem.nodes
    assert nodes is not None
    assert problem.with_present_noise().nodes is nodes
    weighted = problem.weighted(torch.full_like(problem.y, 4.0)).nodes
    assert weighted is not None
    torch.testing.assert_close(weighted.gram.to_dense(), 4.0 * nodes.gram.to_dense())
