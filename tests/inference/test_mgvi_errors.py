"""Errors of log-normal hyperparameters against dense information matrices."""

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, GridPrior
from dustmap.inference import MGVISettings, MGVISolution, fit_mgvi
from tests.inference.test_mgvi import box, draw_truth, model_of, observe, positions

PRIOR_STD = 1.5


def fitted(dim: int, nodes: int, rays: int, seed: int) -> tuple[Batch, MGVISolution]:
    truth = model_of(box(dim, nodes), length=0.3)
    data = observe(truth, draw_truth(truth, seed), positions(rays, dim, seed), 0.1, seed)
    settings = MGVISettings(samples=4, refinements=1, tolerance=0.02, residual=0.005)
    return data, fit_mgvi(truth, data, settings)


def dense_information(data: Batch, solution: MGVISolution) -> Tensor:
    """½ (A_p z)ᵀ A⁻¹ (A_q z) + 1/1.5² of the model linearised at the mode, by dense matrices."""
    model, mode = solution.model, solution.start.mode
    rho = (model.log_mean() + model.latent_root().matmul(mode)).exp()
    L = model.interpolation(data.functional).to_dense()
    J = L * rho
    columns = model.latent_root().columns

    def covariance(theta: Tensor) -> Tensor:
        at = model.learned().build(theta)
        assert isinstance(at.prior, GridPrior)
        K = at.prior.covariance().to_dense() + columns @ columns.mT
        found: Tensor = J @ K @ J.mT + torch.diag(at.likelihood.noise_variance(data)).detach()
        return found

    theta = model.learned().theta
    A = covariance(theta)
    field = model.latent_root().matmul(mode)
    z = torch.linalg.solve(A, data.y - L @ rho + J @ field)
    units = 1e-4 * torch.eye(len(theta)).double()
    pulls = torch.stack([(covariance(theta + u) - covariance(theta - u)) @ z for u in units]) / 2e-4
    own = 0.5 * pulls @ torch.linalg.solve(A, pulls.mT)
    whole: Tensor = own + torch.eye(len(theta)).double() / PRIOR_STD**2
    return whole


@pytest.mark.parametrize(("dim", "nodes", "rays"), [(1, 24, 30), (2, 9, 60)])
def test_errors_are_those_of_the_dense_average_information(dim: int, nodes: int, rays: int) -> None:
    data, solution = fitted(dim, nodes, rays, seed=1)
    errors = solution.errors
    assert errors is not None
    assert errors.names == solution.model.learned().names
    got = torch.tensor(errors.covariance).double().diagonal().sqrt()
    expected = torch.linalg.inv(dense_information(data, solution)).diagonal().sqrt()
    # The last step started within 0.02 standard deviations or a short averaged step from here.
    assert bool(((got / expected).log().abs() < 0.05).all()), got / expected


@pytest.mark.parametrize("dim", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_lengths_stay_between_the_spacing_and_the_box(dim: int) -> None:
    """Of a field that is white at the nodes, and of a uniform one: held there, without an error."""
    nodes, rays = (30, 60) if dim == 1 else (9, 200)
    grid = box(dim, nodes)
    for length, bound in ((0.3 * grid.spacing[0], grid.spacing[0]), (10.0, 1.0)):
        truth = model_of(grid, length=length)
        data = observe(truth, draw_truth(truth, 1), positions(rays, dim, 1), 0.02, 1)
        start = model_of(grid, length=0.3)
        solution = fit_mgvi(start, data, MGVISettings(samples=4, refinements=0, prior_std=10.0))
        learned = dict(
            zip(solution.model.learned().names, solution.model.learned().theta, strict=True)
        )
        assert float(learned["length"].exp()) == pytest.approx(bound)
        errors = solution.errors
        assert errors is not None
        assert errors.held[errors.names.index("length")]
