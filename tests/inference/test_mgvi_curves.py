"""Deviations along the curvature of a log-normal field, against a minimiser that knows nothing."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, ZeroPoints
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference.lognormal._lognormal_descent import Accuracy, descend
from dustmap.inference.lognormal._lognormal_energy import Iterate, draws_at_once
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from dustmap.inference.lognormal._mgvi_curves import (
    Centres,
    CurvedDraws,
    curved_at_once,
    curved_draws,
)
from dustmap.inference.lognormal._mgvi_samples import DrawSolver, Perturbations, metric_draws
from dustmap.inference.lognormal._tangent import GramPreconditioner
from dustmap.linalg import Alone, unwatched
from tests.combinations import covering
from tests.inference.test_mgvi import box, draw_truth, model_of, observe, positions

TIGHT = Accuracy(residual=1e-7, decrease=1e-9, steps=40, cg_steps=1000)
LOOSE = Accuracy(residual=1e-3, decrease=1e-3, steps=40, cg_steps=1000)
COUNT = 4
Energies = Callable[[Tensor], Tensor]


def at_the_mode(dim: int, groups: bool = False, dtype: torch.dtype = torch.float64) -> Iterate:
    """The mode of a small field with a learned mean, and three groups' zero points and scales if
    asked."""
    grid = box(dim, {1: 16, 2: 6, 3: 4}[dim])
    noise = GaussianLikelihood(learn=False)
    model = model_of(grid, mean=ConstantMean(0.3), likelihood=noise, dtype=dtype)
    data = observe(model, draw_truth(model, 1), positions(30, dim, 2), 0.05, 3)
    if groups:
        assert isinstance(data.functional, LineIntegrals)
        functional = replace(data.functional, groups=torch.arange(len(data)) % 3)
        data = Batch(functional, data.y, data.noise_variance)
        model = replace(model, zero_points=ZeroPoints(3, 0.1, 0.2))
    problem = LogNormalProblem.of(model, data)
    xi = torch.zeros(problem.n_latent).to(problem.y)
    start = Iterate.at(problem, xi)
    accuracy = TIGHT if dtype == torch.float64 else LOOSE
    return descend(start, torch.zeros_like(problem.y), accuracy)[0].iterate


def straight(mean: Iterate) -> tuple[Perturbations, Tensor, Tensor]:
    """Perturbations of COUNT samples, their straight deviations and multipliers."""
    numbers = Perturbations.of(mean.problem, 0, range(COUNT))
    copy = Perturbations(numbers.white.clone(), numbers.noise)
    solver = DrawSolver(1e-6, 1000, draws_at_once(COUNT))
    deviations, solve = metric_draws(mean, copy, solver)
    return numbers, deviations, solve.x


def curved(mean: Iterate, accuracy: Accuracy = TIGHT, which: slice = slice(None)) -> CurvedDraws:
    numbers, start, z = straight(mean)
    centre = Centres(mean.problem, mean.xi, mean.log_density)
    how = accuracy, None, unwatched
    return curved_draws(
        centre, numbers.white[which], numbers.noise[which], start[which], z[which], *how
    )


def energy_of(mean: Iterate, which: slice = slice(None)) -> Energies:
    """ξ ↦ E_s of samples, written out."""
    numbers, problem = Perturbations.of(mean.problem, 0, range(COUNT)), mean.problem
    centre = problem.response(mean.log_density.exp(), mean.xi)
    target = centre + problem.noise.sqrt() * numbers.noise[which]

    def energies(xi: Tensor) -> Tensor:
        density = (problem.log_mean + problem.root.matmul(xi)).exp()
        left = target - problem.response(density, xi)
        strain = (xi - mean.xi - numbers.white[which]).square().sum(-1)
        return 0.5 * (left.square() / problem.noise).sum(-1) + 0.5 * strain

    return energies


@pytest.mark.parametrize(("groups", "dim"), covering([False, True], [1, 2, 3]))
def test_curved_deviations_are_the_minima_of_their_energies(dim: int, groups: bool) -> None:
    mean = at_the_mode(dim, groups)
    found = curved(mean).xi
    for s in range(2):
        energies = energy_of(mean, slice(s, s + 1))

        def energy(x: np.ndarray, energies: Energies = energies) -> tuple[float, np.ndarray]:
            xi = torch.from_numpy(x)[None].requires_grad_()
            e = energies(xi).sum()
            (slope,) = torch.autograd.grad(e, xi)
            return float(e.detach()), slope[0].numpy()

        options = {"maxiter": 5000, "maxfun": 20_000, "ftol": 1e-15, "gtol": 1e-8, "maxcor": 50}
        start = found[s].numpy() * 0.9
        lowest = scipy.optimize.minimize(
            energy, start, jac=True, method="L-BFGS-B", options=options
        )
        assert energy(found[s].numpy())[0] == pytest.approx(lowest.fun, rel=1e-7)
        torch.testing.assert_close(found[s], torch.from_numpy(lowest.x), rtol=0.0, atol=2e-3)


def test_samples_together_end_where_they_do_alone() -> None:
    mean = at_the_mode(2, groups=True)
    together = curved(mean)
    for s in range(COUNT):
        alone = curved(mean, which=slice(s, s + 1))
        torch.testing.assert_close(together.xi[s], alone.xi[0], rtol=0.0, atol=1e-6)
        torch.testing.assert_close(together.z[s], alone.z[0], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("groups", [False, True])
def test_multipliers_make_the_deviation(groups: bool) -> None:
    """At the minimum ξ = ξ̄ + ξ₀ + Jᵀ W^½ z at the sample's own density."""
    mean = at_the_mode(2, groups)
    numbers, found, problem = straight(mean)[0], curved(mean), mean.problem
    for s in range(COUNT):
        xi = found.xi[s]
        density = (problem.log_mean + problem.root.matmul(xi)).exp()
        tangent = problem.tangent(density, xi[problem.root.n_field :])
        pulled = tangent.rmatmul(problem.noise.rsqrt() * found.z[s])
        expected = mean.xi + numbers.white[s] + pulled
        torch.testing.assert_close(xi, expected, rtol=0.0, atol=1e-4)


def test_rough_steps_lower_every_energy() -> None:
    mean = at_the_mode(2)
    energies = energy_of(mean)
    start = energies(mean.xi + straight(mean)[1])
    one = energies(curved(mean, Accuracy(0.5, 0.0, 1)).xi)
    more = energies(curved(mean, Accuracy(0.1, 0.0, 3)).xi)
    assert bool((one < start).all())
    assert bool((more <= one * (1.0 + 1e-9)).all())


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("decrease", [0.01, 0.3, 3.0])
def test_samples_end_within_the_decrease_of_their_minima(dim: int, decrease: float) -> None:
    """Of solves that leave as little."""
    mean = at_the_mode(dim)
    energies = energy_of(mean)
    least = energies(curved(mean).xi)
    residual = (decrease / len(mean.problem.y)) ** 0.5
    ends = energies(curved(mean, Accuracy(residual, decrease, 20)).xi)
    assert float((ends - least).max()) < decrease


@pytest.mark.parametrize("count", [4, 8, 16, 34, 40, 48, 64, 96, 128])
@pytest.mark.parametrize("longest", [40, 2**17, 2**20])
def test_groups_are_of_equal_size(count: int, longest: int) -> None:
    """But for the last, which may have one sample less for each of the others."""
    problem = at_the_mode(1).problem
    problem = replace(problem, log_mean=torch.zeros(1).expand(longest))
    size = curved_at_once(count, problem).size
    groups = -(-count // size)
    assert size <= 32
    assert size * groups - count < groups


def test_single_precision_ends_near_double() -> None:
    double, single = at_the_mode(2), at_the_mode(2, dtype=torch.float32)
    a, b = curved(double), curved(single, LOOSE)
    fields = [m.problem.root.matmul(x.xi).double() for m, x in ((double, a), (single, b))]
    torch.testing.assert_close(fields[1], fields[0], rtol=0.0, atol=0.02)


@pytest.mark.parametrize("changed", ["density", "noise"])
def test_the_preconditioner_follows_density_and_noise(changed: str) -> None:
    """A factor along all rays and another noise change G to D G D, which it knows exactly."""
    mean = at_the_mode(2)
    problem, density = mean.problem, mean.log_density.exp()
    made = GramPreconditioner.of(
        mean.tangent.gram(), mean.tangent.size, len(problem.y), Alone(), unwatched
    )
    if changed == "density":
        density = 3.0 * density
    else:
        scale = torch.linspace(0.3, 3.0, len(problem.y), dtype=torch.float64)
        problem = replace(problem, noise=problem.noise * scale)
    tangent = problem.tangent(density, mean.c)
    A, identity = tangent.gram().to_dense(), torch.eye(len(problem.y), dtype=torch.float64)
    # Eigenvalues of A reach 7e5; rounding of the factor leaves 5e-7 to 7e-6, as densities change
    # by 1e-7.
    torch.testing.assert_close(made.near(tangent).to_dense() @ A, identity, rtol=0, atol=2e-5)
    densities = torch.stack([mean.log_density.exp(), density])
    seen = problem.rows.matmul(densities)
    stack = made.near(problem.tangent(densities, mean.c.expand(2, -1), seen))
    columns = torch.stack([stack.matmul(torch.stack([e, e]))[1] for e in identity])
    torch.testing.assert_close(columns @ A, identity, rtol=0, atol=2e-5)


@pytest.mark.parametrize("groups", [False, True])
def test_a_stack_has_the_gram_matrices_of_its_tangents(groups: bool) -> None:
    mean = at_the_mode(2, groups)
    problem = mean.problem
    generator = torch.Generator().manual_seed(4)
    shape = (3, len(mean.log_density))
    densities = torch.randn(shape, generator=generator, dtype=torch.float64).exp()
    c = torch.randn(3, len(mean.c), generator=generator, dtype=torch.float64)
    x = torch.randn(3, len(problem.y), generator=generator, dtype=torch.float64)
    stack = problem.tangent(densities, c, problem.rows.matmul(densities))
    found = stack.gram().matmul(x)
    for s in range(3):
        one = problem.tangent(densities[s], c[s])
        torch.testing.assert_close(found[s], one.gram().matmul(x[s]))
        torch.testing.assert_close(stack.size[s], one.size)
    two = stack.taken(torch.tensor([2, 0])).gram()
    torch.testing.assert_close(two.matmul(x[[2, 0]]), found[[2, 0]])
