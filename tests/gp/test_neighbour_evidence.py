"""The evidence of neighbours against the exact evidence."""

import pytest
import torch
from torch import Tensor

from dustmap.gp import (
    Batch,
    ConstantMean,
    ExactGP,
    GPModel,
    HeldOutRows,
    NeighbourEvidence,
    Parameters,
)
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern12, Matern32, StationaryKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from tests.gp.parameters import traced


def drawn(n: int, sigma: float, seed: int = 0) -> Batch:
    """Values of a Matérn-3/2 field of ℓ = (2, 3) and variance 1.5 with noise, about 0.5."""
    generator = torch.Generator().manual_seed(seed)
    x = 20.0 * torch.rand(n, 2, dtype=torch.float64, generator=generator)
    kernel = truth()
    K = kernel(x[:, None] - x) + sigma**2 * torch.eye(n, dtype=torch.float64)
    white = torch.randn(n, dtype=torch.float64, generator=generator)
    return Batch(PointValues(x), 0.5 + torch.linalg.cholesky(K) @ white)


def truth() -> StationaryKernel:
    return Matern32((2.0, 3.0), 1.5, dim=2)


def exact(kernel: StationaryKernel, data: Batch, sigma: float) -> Tensor:
    noise = torch.full_like(data.y, sigma**2)
    gp = ExactGP(kernel, ConstantMean(0.5, learn=False))
    return gp.log_evidence(data.functional, data.y, noise)


def test_with_all_neighbours_it_is_exact_and_so_is_its_gradient() -> None:
    data, kernel = drawn(50, 0.2), Matern12((2.0, 3.0), 1.2, dim=2)
    likelihood, mean = GaussianLikelihood(jitter=0.3), ConstantMean(0.5, learn=False)
    evidence = NeighbourEvidence.of(kernel, data, neighbours=50)
    value = evidence.log_evidence(GPModel(kernel, mean, likelihood))
    kernel, leaves = traced(kernel)
    reference = exact(kernel, data, 0.3)
    assert float(value.detach()) == pytest.approx(float(reference.detach()), rel=1e-9)
    parameters = Parameters.of(GPModel(kernel, mean, likelihood.fixed()))
    total, gradient = evidence.gradient(parameters, parameters.theta)
    assert total == pytest.approx(float(value))
    expected = [slope.reshape(-1) for slope in torch.autograd.grad(reference, leaves)]
    assert torch.allclose(gradient, torch.cat(expected), rtol=1e-6)


def test_thirty_neighbours_are_nearly_exact() -> None:
    data, kernel = drawn(1000, 0.2), truth()
    evidence = NeighbourEvidence.of(kernel, data)
    mean, likelihood = ConstantMean(0.5, learn=False), GaussianLikelihood(jitter=0.2)
    value = float(evidence.log_evidence(GPModel(kernel, mean, likelihood)).detach())
    assert value == pytest.approx(float(exact(kernel, data, 0.2)), abs=0.02 * 1000)


def test_a_part_of_the_sum_stands_for_all() -> None:
    data, kernel = drawn(1000, 0.2), truth()
    mean, likelihood = ConstantMean(0.5, learn=False), GaussianLikelihood(jitter=0.2)
    full, part = (
        float(
            NeighbourEvidence.of(kernel, data, max_rows=rows)
            .log_evidence(GPModel(kernel, mean, likelihood))
            .detach()
        )
        for rows in (None, 500)
    )
    assert part == pytest.approx(full, abs=60.0)
    assert part != full


def test_hyperparameters_are_recovered_from_a_poor_start() -> None:
    data, kernel = drawn(1200, 0.2), Matern32((10.0, 10.0), 0.2, dim=2)
    likelihood = GaussianLikelihood(jitter=1.0)
    model = GPModel(kernel, ConstantMean(0.5), likelihood)
    fit = NeighbourEvidence.of(kernel, data, max_rows=500).fit(model)
    likelihood, terms = fit.model.noise, fit.model.kernel.terms()
    assert fit.status.value == "converged"
    assert fit.objective[-1] > fit.objective[0]
    assert likelihood.log_jitter is not None
    assert float(likelihood.log_jitter.detach().exp()) == pytest.approx(0.2, rel=0.25)
    assert terms[0].lengthscale.tolist() == pytest.approx([2.0, 3.0], rel=0.3)


def test_what_cannot_be_fitted_is_refused() -> None:
    data, kernel = drawn(20, 0.2), truth()
    with pytest.raises(ValueError, match="nothing to learn"):
        NeighbourEvidence.of(kernel, data).fit(
            GPModel(kernel.fixed(), ConstantMean(), GaussianLikelihood())
        )
    rays = LineIntegrals.from_observer(torch.ones(20, 2, dtype=torch.float64))
    with pytest.raises(TypeError, match="point values"):
        NeighbourEvidence.of(kernel, Batch(rays, data.y))


@pytest.mark.parametrize(("shared", "neighbours"), [(90, 20), (30, 120), (200, 5)])
def test_held_out_rows_are_conditionals_of_the_exact_process(shared: int, neighbours: int) -> None:
    data, kernel = drawn(120, 0.2), Matern12((2.0, 3.0), 1.2, dim=2)
    model = GPModel(kernel, ConstantMean(0.5), GaussianLikelihood(jitter=0.3))
    held = HeldOutRows.of(kernel, data, 25, shared=shared, neighbours=neighbours)
    assert not set(held.rows.tolist()) & {*held.shared.tolist(), *held.near.flatten().tolist()}
    expected = []
    for row, near in zip(held.rows.tolist(), held.near.tolist(), strict=True):
        assert not set(near) & set(held.shared.tolist())
        given = torch.tensor([n for n in near if n >= 0] + held.shared.tolist())
        both = torch.cat([given, torch.tensor([row])])
        ends = [exact(kernel, data[rows], 0.3) for rows in (both, given)]
        expected.append(float((ends[0] - ends[1]).detach()))
    assert held.scores(model).tolist() == pytest.approx(expected, rel=1e-8)
