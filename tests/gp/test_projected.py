"""Nodes that hold the projection of a field, against projections by dense algebra."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import GridPrior, Parameters, RegularGrid
from dustmap.gp.covariances import ClosedForm
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32, ProjectedKernel
from dustmap.inference import Unresolved

#: A share so near one that the rest of it is round-off.
WHOLE = 1.0 - 1e-12


def hats(places: Tensor, nodes: int) -> Tensor:
    """Linear hats (nodes, K) around the nodes of a circle of that many, at places in nodes."""
    apart = (places - torch.arange(nodes)[:, None] + nodes / 2) % nodes - nodes / 2
    return (1.0 - apart.abs()).clamp_min(0.0)


@pytest.mark.parametrize("kernel", [Matern32(3.0, 1.3, dim=1), Matern12(1.5, 0.7, dim=1)])
def test_nodes_have_the_covariance_of_the_least_squares_projection(kernel: AbstractKernel) -> None:
    """Of a field on a circle, known at 32 places to a node: u = (H Hᵀ)⁻¹ H s."""
    nodes, fine = 48, 32
    places = (torch.arange(nodes * fine).double() + 0.5) / fine
    lag = places - places[0]
    images = [kernel((lag + j * nodes)[:, None]).detach() for j in (-2, -1, 0, 1)]
    row = torch.stack(images).sum(0)
    index = torch.arange(len(places))
    K = row[(index[None] - index[:, None]) % len(places)]
    H = hats(places, nodes)
    weights = torch.linalg.solve(H @ H.mT, H)
    expected = torch.fft.rfft((weights @ K @ weights.mT)[0]).real
    grid = RegularGrid((0.0,), (1.0,), (nodes,))
    projected = ProjectedKernel.of(kernel, WHOLE)
    found = GridPrior.padded(projected, grid, torus_shape=(nodes,)).spectrum.detach()
    values = GridPrior.padded(kernel, grid, torus_shape=(nodes,)).spectrum.detach()
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0)
    assert float((values / expected)[nodes // 3]) < 0.8


def test_in_the_plane_a_rough_field_has_the_covariance_of_its_projection() -> None:
    """Of one that folds much of its power at the nodes: φ/G alone would double its variance."""
    kernel, nodes, fine = Matern12(1.5, dim=2), 12, 8
    places = (torch.arange(nodes * fine).double() + 0.5) / fine
    images = torch.arange(-3, 4) * nodes
    lag = (places - places[0])[:, None] + images
    size = (len(places), len(places), len(images), len(images))
    x, y = lag[:, None, :, None].expand(size), lag[None, :, None, :].expand(size)
    covariance = kernel(torch.stack([x, y], -1)).detach().sum((-2, -1))
    spectrum = torch.fft.fft2(covariance).real
    H = hats(places, nodes)
    first = torch.linalg.solve(H @ H.mT, H)[0]
    weights = first[:, None] * first
    # Of one node's weights with those of all: both are the same, moved.
    seen = torch.fft.fft2(weights).abs().square() * spectrum
    expected = torch.fft.ifft2(seen).real[::fine, ::fine]
    grid = RegularGrid((0.0, 0.0), (1.0, 1.0), (nodes, nodes))
    projected = ProjectedKernel.of(kernel, WHOLE)
    prior = GridPrior.padded(projected, grid, torus_shape=(nodes, nodes))
    found = torch.fft.irfft2(prior.spectrum.detach(), s=(nodes, nodes))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)
    assert 1.1 < float(found[0, 0]) < 1.4


def test_integrals_along_rays_have_the_variance_that_values_at_nodes_take_from_them() -> None:
    """Of a field of three spacings' length: that of the projection and what the grid leaves out."""
    kernel, grid = Matern32(3.0, dim=3), RegularGrid((-7.0,) * 3, (1.0,) * 3, (15,) * 3)
    generator = torch.Generator().manual_seed(0)
    x = 12.0 * torch.rand(60, 3, generator=generator, dtype=torch.float64) - 6.0
    rays, length = LineIntegrals.from_observer(x), x.norm(dim=1)
    wanted = ClosedForm().variance(kernel, rays).detach()
    rows = interpolation(rays, grid, dtype=torch.float64)

    def held(k: AbstractKernel) -> Tensor:
        prior = GridPrior.padded(k, grid, padding=6.0)
        L = rows.rmatmul(torch.eye(len(rays), dtype=torch.float64))
        return (L * prior.covariance().matmul(L)).sum(1)

    left = Unresolved.of(kernel, grid).length * length
    ratio = (held(ProjectedKernel.of(kernel, WHOLE)) + left) / wanted
    assert float(ratio.median()) == pytest.approx(1.0, abs=0.01)
    assert float((held(kernel) / wanted).median()) < 0.96


@pytest.mark.parametrize("shape", [(17,), (7, 6), (5, 4, 3)])
def test_root_and_covariance_are_of_one_spectrum(shape: tuple[int, ...]) -> None:
    grid = RegularGrid((0.3,) * len(shape), (0.25, 0.3, 0.2)[: len(shape)], shape)
    kernel = ProjectedKernel.of(Matern32(0.4, 1.7, dim=grid.dim), 0.6)
    prior = GridPrior.padded(kernel, grid)
    R, K = prior.root().to_dense().detach(), prior.covariance().to_dense()
    torch.testing.assert_close(R @ R.mT, K, rtol=0, atol=1e-12)
    torch.testing.assert_close(prior.dense_covariance().detach(), K, rtol=0, atol=1e-12)
    # Values at nodes have short waves folded onto the longest.
    values = GridPrior.padded(kernel.kernel, grid).spectrum.flatten()[0]
    assert 0.99 < float(prior.spectrum.flatten()[0] / values) < 1.0


def test_a_share_of_nothing_is_the_field_at_the_nodes() -> None:
    kernel = Matern32(2.0, dim=2)
    grid = RegularGrid((0.0, 0.0), (1.0, 2.0), (6, 5))
    small = GridPrior.padded(ProjectedKernel.of(kernel, 1e-12), grid)
    torch.testing.assert_close(small.spectrum, GridPrior.padded(kernel, grid).spectrum)


def test_the_share_is_a_parameter_by_its_odds() -> None:
    kernel = ProjectedKernel.of(Matern32(2.0, dim=1), 0.75)
    parameters = Parameters.of(kernel)
    assert parameters.names == ("length", "variance", "projection")
    assert float(parameters.theta[2]) == pytest.approx(math.log(3.0))
    moved = parameters.build(parameters.theta - torch.tensor([0.0, 0.0, math.log(9.0)]))
    assert float(moved.share) == pytest.approx(0.25)
    assert float(moved.variance()) == 1.0


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, math.nan])
def test_a_share_of_all_or_nothing_is_refused(share: float) -> None:
    with pytest.raises(UserError, match="share must lie between 0 and 1"):
        ProjectedKernel.of(Matern32(2.0, dim=1), share)


def test_a_projected_kernel_is_no_part_of_another() -> None:
    """Priors look for it at the top alone: of a sum or a product they had the values."""
    projected = ProjectedKernel.of(Matern12(1.5, dim=1), 0.75)
    for make in (
        lambda: 2.0 * projected,
        lambda: projected + Matern32(4.0, dim=1),
        lambda: Matern32(4.0, dim=1) + projected,
    ):
        with pytest.raises(UserError, match="a projected kernel is no part of a"):
            make()
    ProjectedKernel.of(Matern12(1.5, dim=1) + Matern32(4.0, dim=1), 0.75)
