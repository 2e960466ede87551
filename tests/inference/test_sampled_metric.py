"""Gauss-Newton steps of means with samples, against dense algebra with all derivatives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dustmap.gp import ConstantMean
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference.lognormal import _lognormal_descent, _lognormal_problem
from dustmap.inference.lognormal._lognormal_descent import Accuracy, descend_samples
from dustmap.inference.lognormal._lognormal_energy import Iterate, preconditioner_at
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from dustmap.inference.lognormal._sampled_metric import (
    SampledGram,
    SampledSteps,
    SampledTangent,
    sampled_steps,
)
from dustmap.linalg import EnteredOperator, SparseOperator, unwatched
from tests.inference.gridded import energy_gradient
from tests.inference.test_group_scales import log_normal_model, observed
from tests.inference.test_mgvi import box, draw_truth, model_of, observe, positions
from tests.inference.test_mgvi_curves import at_the_mode
from tests.inference.test_seen_nodes import both_sides, case

SAMPLES, SPREAD = 4, 0.5


def iterates_of(problem: LogNormalProblem, count: int, spread: float = SPREAD) -> list[Iterate]:
    """So many means with samples of their own, far from the optimum."""
    generator = torch.Generator().manual_seed(1)
    shape = count, SAMPLES // 2 + 1, problem.n_latent
    white = spread * torch.randn(shape, generator=generator, dtype=torch.float64).to(problem.y)
    return [
        Iterate.at(
            problem,
            0.5 * xi,
            torch.cat([delta, -delta]),
        )
        for xi, *some in white
        for delta in [torch.stack(some)]
    ]


def derivatives(at: Iterate) -> Tensor:
    """J_s (S, N, n), float64."""
    problem, eye = at.problem, torch.eye(len(at.xi)).to(at.xi)
    rows = []
    for density, seen, delta in zip(at.densities, at.seen, at.deviations, strict=True):
        c = (at.xi + delta)[problem.root.n_field :]
        rows.append(problem.tangent(density, c, seen).matmul(eye).mT)
    return torch.stack(rows).double()


def metric(at: Iterate) -> Tensor:
    """I + mean_s J_sᵀ Σ⁻¹ J_s (n, n)."""
    J, weights = derivatives(at), 1.0 / at.problem.noise.double()
    eye = torch.eye(len(at.xi), dtype=torch.float64)
    return eye + torch.einsum("sai,a,saj->ij", J, weights, J) / len(J)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("groups", [False, True])
def test_steps_are_those_of_dense_algebra(dim: int, groups: bool) -> None:
    problem = at_the_mode(dim, groups=groups).problem
    iterates = iterates_of(problem, 2)
    made = preconditioner_at(iterates[0], len(problem.y) // 2, None, unwatched)
    wanted = torch.full((2,), 1e-9)
    for preconditioner in (None, made):
        steps = sampled_steps(iterates, wanted, preconditioner, 2000)
        assert int(steps.cg_steps.min()) > 0
        for at, step in zip(iterates, steps.moves, strict=True):
            expected = torch.linalg.solve(metric(at), -energy_gradient(at))
            torch.testing.assert_close(step.xi, expected, rtol=0.0, atol=1e-6)


def test_scales_of_groups_are_in_the_metric() -> None:
    problem = LogNormalProblem.of(log_normal_model(2, 1.0), observed(2))
    iterates = iterates_of(problem, 2, 0.2)
    made = preconditioner_at(iterates[0], 20, None, unwatched)
    steps = sampled_steps(iterates, torch.full((2,), 1e-9), made, 2000).moves
    for at, step in zip(iterates, steps, strict=True):
        expected = torch.linalg.solve(metric(at), -energy_gradient(at))
        torch.testing.assert_close(step.xi, expected, rtol=0.0, atol=1e-6)


def test_single_precision_is_as_good_as_its_rounding() -> None:
    problem = at_the_mode(2, dtype=torch.float32).problem
    iterates = iterates_of(problem, 3)
    steps = sampled_steps(iterates, torch.full((3,), 1e-5), None, 500).moves
    for at, step in zip(iterates, steps, strict=True):
        expected = torch.linalg.solve(metric(at), -energy_gradient(at).double())
        atol = 3e-3 * float(expected.abs().max())
        torch.testing.assert_close(step.xi.double(), expected, rtol=0.0, atol=atol)


@pytest.mark.parametrize("dim", [1, 2])
def test_nodes_that_data_see_lead_where_the_data_do(dim: int) -> None:
    found = []
    for problem in both_sides(*case(dim)):
        iterates = iterates_of(problem, 2)
        made = preconditioner_at(iterates[0], 8, None, unwatched)
        for preconditioner in (None, made):
            wanted = torch.full((2,), 1e-8)
            steps = sampled_steps(iterates, wanted, preconditioner, 3000).moves
            for step in steps:
                torch.testing.assert_close(problem.root.matmul(step.xi), step.field)
            found.append(torch.stack([step.xi for step in steps]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("side", [0, 1])
def test_multipliers_of_a_step_solve_for_it_again(side: int) -> None:
    """From the side of the data and from that of the nodes."""
    iterates = iterates_of(both_sides(*case(2))[side], 2)
    how = torch.full((2,), 1e-4), None, 3000
    first = sampled_steps(iterates, *how)
    assert int(first.cg_steps.min()) > 50
    again = sampled_steps(iterates, *how, start=first.multipliers)
    assert int(again.cg_steps.max()) <= 1  # rounding of the steps before is left
    for step, other in zip(again.moves, first.moves, strict=True):
        torch.testing.assert_close(step.xi, other.xi, rtol=0.0, atol=1e-3)


def test_products_are_symmetric_and_taken_of_some_means_alone() -> None:
    problem = at_the_mode(2, groups=True).problem
    gram = SampledGram(SampledTangent.of(iterates_of(problem, 3)))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, gram.shape[0], generator=generator, dtype=torch.float64)
    product = gram.matmul(x)
    torch.testing.assert_close((y * product).sum(1), (x * gram.matmul(y)).sum(1))
    which = torch.tensor([0, 2])
    torch.testing.assert_close(gram.taken(which).matmul(x[which]), product[which])


def uncertain(seed: int) -> Iterate:
    """ξ̄ = 0 with samples whose derivatives differ by factors, from data of a smooth field."""
    noise = GaussianLikelihood(learn=False)
    mean = ConstantMean(0.0, learn=False)
    model = model_of(box(2, 9), variance=2.0, mean=mean, likelihood=noise, learn=False)
    data = observe(model, draw_truth(model, seed), positions(200, 2, seed), 0.3, seed)
    at = iterates_of(LogNormalProblem.of(model, data), 1)[0]
    return Iterate.at(at.problem, torch.zeros_like(at.xi), at.deviations)


@pytest.mark.parametrize("seed", range(3))
def test_four_steps_arrive_where_densities_are_uncertain_by_factors(seed: int) -> None:
    """They leave less than a two-hundredth of what there is to gain, thousands of nats."""
    at = uncertain(seed)
    four, end = (
        descend_samples([at], Accuracy(residual=1e-3, decrease=1e-6, steps=n, cg_steps=2000))[0]
        for n in (4, 40)
    )
    whole = at.energy - end.iterate.energy
    assert whole > 500.0
    assert four.iterate.energy - end.iterate.energy < 0.005 * whole


def test_descents_that_go_on_from_their_multipliers_take_fewer_steps_of_solvers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fifth fewer, to ends as low."""
    accuracy = Accuracy(residual=0.1, decrease=0.1, steps=12, cg_steps=2000)
    starts = [[uncertain(seed)] for seed in range(3)]

    def cold(*how: Any) -> SampledSteps:
        return sampled_steps(*how[:-1])

    warm = [descend_samples(start, accuracy)[0] for start in starts]
    monkeypatch.setattr(_lognormal_descent, "sampled_steps", cold)
    other = [descend_samples(start, accuracy)[0] for start in starts]
    spent, without = (sum(end.cg_steps for end in ends) for ends in (warm, other))
    assert spent < 0.8 * without
    for one, end in zip(warm, other, strict=True):
        assert one.iterate.energy < end.iterate.energy + 1.0


def test_the_metric_of_the_mean_response_leads_elsewhere() -> None:
    """Near the optimum, from where the derivatives of all samples lead back in one step."""
    exact = Accuracy(residual=1e-4, decrease=1e-8, steps=60, cg_steps=2000)
    for seed in range(3):
        (end,) = descend_samples([uncertain(seed)], exact)
        least, xi = end.iterate.energy, end.iterate.xi
        generator = torch.Generator().manual_seed(seed)
        off = 0.02 * torch.randn(len(xi), generator=generator, dtype=torch.float64)
        at = Iterate.at(end.iterate.problem, xi + off, end.iterate.deviations)
        J, weights = derivatives(at).mean(0), 1.0 / at.problem.noise
        alone = torch.eye(len(xi), dtype=torch.float64) + J.mT @ (weights[:, None] * J)
        steps = [torch.linalg.solve(each, -energy_gradient(at)) for each in (alone, metric(at))]
        left = [
            Iterate.at(at.problem, at.xi + step, at.deviations).energy - least for step in steps
        ]
        assert left[1] < 0.2 * left[0]


def test_relative_noise_is_that_of_the_problem() -> None:
    """Its σ_n is held fixed in a step, as in the energy."""
    noise = GaussianLikelihood(relative=0.1, learn=False)
    model = model_of(box(1, 12), mean=ConstantMean(0.0), likelihood=noise, learn=False)
    data = observe(model, draw_truth(model, 0), positions(30, 1, 0), 0.1, 0)
    at = iterates_of(LogNormalProblem.of(model, data), 1)[0].with_own_response()
    (step,) = sampled_steps([at], torch.tensor([1e-9]), None, 2000).moves
    expected = torch.linalg.solve(metric(at), -energy_gradient(at))
    torch.testing.assert_close(step.xi, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nodes_that_no_datum_sees_change_nothing(
    dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rays through one corner of the box: products, and steps of means, with and without the other
    nodes."""
    model = model_of(box(dim, {1: 16, 2: 8, 3: 5}[dim]), learn=True, dtype=dtype)
    data = observe(model, draw_truth(model, 1), 0.4 * positions(20, dim, 2).abs(), 0.1, 3)
    few = LogNormalProblem.of(model, data)
    monkeypatch.setattr(_lognormal_problem, "_FEW_SEEN", 0.0)
    whole = LogNormalProblem.of(model, data)
    assert isinstance(few.rows, EnteredOperator)
    assert isinstance(whole.rows, SparseOperator)
    assert few.rows.entries.shape[1] < whole.rows.shape[1]
    near, loose = (1e-4, 0.02) if dtype == torch.float32 else (1e-7, 1e-7)
    (at, other), (same, _) = iterates_of(few, 2), iterates_of(whole, 2)
    generator = torch.Generator().manual_seed(2)
    for place, there in ((at.density, same.density), (at.densities, same.densities)):
        count = len(place) if place.ndim > 1 else 3
        x = torch.randn(count, few.n_latent, generator=generator, dtype=torch.float64).to(dtype)
        y = torch.randn(count, len(few.y), generator=generator, dtype=torch.float64).to(dtype)
        c = x[:, :0] if place.ndim > 1 else x[0, :0]
        one, two = few.tangent(place, c), whole.tangent(there, c)
        torch.testing.assert_close(one.matmul(x), two.matmul(x), rtol=near, atol=near)
        torch.testing.assert_close(one.rmatmul(y), two.rmatmul(y), rtol=near, atol=near)
        torch.testing.assert_close(one.spread(y), two.spread(y), rtol=near, atol=near)
        torch.testing.assert_close(one.size, two.size, rtol=near, atol=near)
    wanted = torch.full((2,), 1e-6 if dtype == torch.float64 else 1e-3)
    steps = sampled_steps([at, other], wanted, None, 2000)
    for step, expected in zip(
        steps.moves, sampled_steps(iterates_of(whole, 2), wanted, None, 2000).moves, strict=True
    ):
        torch.testing.assert_close(step.field, expected.field, rtol=loose, atol=loose)
