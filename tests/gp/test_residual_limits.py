"""Residual variances of local weights: gradients, precision, and what is refused."""

import logging

import pytest
import torch
from torch import Tensor

from dustmap.gp import GridPrior
from dustmap.gp.covariances import ClosedForm, MonteCarlo
from dustmap.gp.features import LocalFeatures, stencil_order
from dustmap.gp.features import _residuals as residuals
from dustmap.gp.features import _stencil as residual_table
from dustmap.gp.features._nodes import nodes_of
from dustmap.gp.features._residuals import LocalResiduals, ResidualVariance
from dustmap.gp.functionals import (
    Derivatives,
    LineIntegrals,
    PointMeasure,
    PointValues,
    Stacked,
)
from dustmap.gp.kernels import AbstractKernel, Matern32, Matern52
from tests.gp.parameters import of_parameters
from tests.gp.residual_cases import (
    F64,
    SHAPES,
    dense_residual,
    directions,
    inside,
    make_prior,
    rays,
    variance,
)
from tests.gp.residual_definition import exact_residual_variance


@pytest.mark.parametrize("shape", SHAPES)
def test_definition_is_the_dense_one(shape: tuple[int, ...]) -> None:
    prior = make_prior(shape)
    features = LocalFeatures(prior, order=2)
    points = PointValues(inside(prior, 5))
    measure = PointMeasure(points.x[:, None], torch.ones(5, 1, dtype=F64))
    expected = dense_residual(prior, points, measure, 2)
    exact = exact_residual_variance(features, points)
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-6)
    stacked = Stacked((rays(prior, 3), points))[torch.tensor([4, 1, 7])]
    parts = exact_residual_variance(features, stacked)
    torch.testing.assert_close(parts[[0, 2]], expected[[1, 4]], rtol=0, atol=1e-6)
    alone = exact_residual_variance(features, rays(prior, 3)[1:2])
    torch.testing.assert_close(parts[1:2], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(9,), (6, 5), pytest.param((4, 4, 4), marks=pytest.mark.slow)])
def test_gradients_in_every_kernel_parameter(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        residual_table, "_LATTICE_STEPS", {1: 8, 2: 4, 3: 4}
    )  # small tables are quick
    monkeypatch.setattr(residual_table, "REACH", 3)
    dim = len(shape)
    prior = make_prior(shape)
    functional = Stacked(
        (
            rays(prior, 2),
            PointValues(inside(prior, 2)),
            Derivatives(inside(prior, 2, seed=5), directions(2, dim)),
            PointMeasure(inside(prior, 2, seed=6)[None], torch.ones(1, 2, dtype=F64)),
        )
    )

    def outputs(kernel: AbstractKernel) -> Tensor:
        built = GridPrior.padded(kernel, prior.grid, torus_shape=prior.torus_shape)
        return variance(built, functional, 2)

    objective = of_parameters(Matern32((1.0,) * dim), outputs)
    scales = torch.linspace(0.5, 0.8, dim, dtype=F64, requires_grad=True)
    log_variance = torch.tensor(0.3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(
        objective, (scales, log_variance), atol=1e-6, rtol=1e-4, fast_mode=dim > 1
    )


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    prior = make_prior((6, 5, 5))
    functional = Stacked((rays(prior, 9), PointValues(inside(prior, 9))))
    whole = variance(prior, functional, 2).detach()
    monkeypatch.setattr(residuals, "_CHUNK_NODES", 20)
    monkeypatch.setattr(residuals, "_CHUNK_ENTRIES", 20)
    torch.testing.assert_close(variance(prior, functional, 2).detach(), whole, rtol=1e-12, atol=0)


def test_float32_is_the_rounded_float64() -> None:
    single = variance(make_prior((8, 7), dtype=torch.float32), rays(make_prior((8, 7)), 6), 4)
    double = variance(make_prior((8, 7)), rays(make_prior((8, 7)), 6), 4)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, double.float(), rtol=1e-6, atol=0)


def test_variance_scales_the_residuals() -> None:
    base = make_prior((8, 7), Matern32(2.0, 1.0, dim=2))
    scaled = make_prior((8, 7), Matern32(2.0, 7.0, dim=2))
    functional = Stacked((rays(base, 6), PointValues(inside(base, 3))))
    left = variance(base, functional, 4).detach()
    assert bool((left > 0).all())
    torch.testing.assert_close(
        variance(scaled, functional, 4).detach(), 7.0 * left, rtol=1e-8, atol=0
    )


def test_rays_through_the_padding_follow_the_torus() -> None:
    prior = make_prior((8, 7))
    start = torch.tensor([[-1.9, -0.6], [-1.9, 0.4]], dtype=F64)
    across = LineIntegrals.segment(start, start + 3.0)
    nodes = nodes_of(across, prior.grid, prior.torus_shape)
    assert int(nodes.cell.max()) >= max(prior.grid.shape)
    shift = torch.tensor(prior.grid.spacing, dtype=F64)
    within = LineIntegrals.segment(start + shift, start + shift + 3.0)
    torch.testing.assert_close(
        variance(prior, across, 2).detach(), variance(prior, within, 2).detach(), rtol=1e-9, atol=0
    )


def test_measures_of_many_points_take_the_table() -> None:
    prior = make_prior((16, 14), Matern32(2.0, dim=2))
    features = LocalFeatures(prior, MonteCarlo(12, seed=4), order=2)
    residual = LocalResiduals(prior, MonteCarlo(12, seed=4), 2)
    functional = rays(prior, 30)
    exact = exact_residual_variance(features, functional)
    error = residual.variance(functional).value.detach() / exact - 1.0
    assert float(error.abs().median()) < 0.1


def test_negative_values_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = ResidualVariance.of(torch.tensor([0.5, -1e-12, 2.0], dtype=F64), torch.float32)
    assert result.clamped == 1
    assert result.value.tolist() == [0.5, 0.0, 2.0]
    assert "1 of 3 residual variances were negative" in caplog.text


def test_rays_without_weight_leave_nothing() -> None:
    prior = make_prior((8, 7))
    ray = rays(prior, 2)
    empty = LineIntegrals(ray.origin, ray.direction, ray.edges, 0.0 * ray.weights)
    assert variance(prior, empty, 2).tolist() == [0.0, 0.0]


def _features(prior: GridPrior, memory: int) -> dict[int, LocalFeatures]:
    return {p: LocalFeatures(prior, ClosedForm(), p, memory) for p in (2, 4)}


def test_points_take_four_nodes_per_axis() -> None:
    prior = make_prior((8, 7))
    features = _features(prior, 2**31)
    chosen = stencil_order(features, PointValues(inside(prior, 20)), torch.ones(20, dtype=F64))
    assert chosen.order == 4


@pytest.mark.parametrize(
    ("noise", "memory", "order", "words"),
    [
        (1e3, 2**31, 2, "only"),
        (1e-6, 2**31, 4, "lower"),
        (1e-6, 1000, 4, "lower"),
        (0.05, 1000, 2, "bytes"),
        (0.05, 2**31, 4, "lower"),
    ],
)
def test_rays_take_two_where_that_does_as_well(
    noise: float, memory: int, order: int, words: str
) -> None:
    prior = make_prior((10, 9), Matern52(2.5, dim=2))
    functional = rays(prior, 40)
    variances = torch.full((40,), noise, dtype=F64)
    features = _features(prior, memory)
    chosen = stencil_order(features, functional, variances, sample=30, gain=0.05)
    assert chosen.order == order
    assert words in chosen.reason


def test_stencil_order_refuses_noise_of_another_length() -> None:
    prior = make_prior((8, 7))
    features = _features(prior, 2**31)
    with pytest.raises(ValueError, match=r"noise_variance must be \(3,\)"):
        stencil_order(features, PointValues(inside(prior, 3)), torch.ones(2, dtype=F64))
