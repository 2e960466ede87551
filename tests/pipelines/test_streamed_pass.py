"""A pass over a store is the product that a fit takes in memory."""

import functools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dustmap.gp import Batch, ConstantMean, GridPrior, RegularGrid
from dustmap.gp.features import (
    BeamTable,
    LocalFeatures,
    beamed_interpolation,
    interpolation,
    interpolation_taps,
)
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GridModel
from dustmap.sky.observations import HealpixBeams, observe
from dustmap.sky.stars import (
    AbstractDistances,
    ExactDistances,
    GaussianDistances,
    StarStore,
    StarTable,
    open_star_store,
    star_store,
)
from dustmap.sky.systems import system_named
from pipelines.reproduce.beyond_memory._stream import stream

GRID = RegularGrid((-100.0, -100.0, -50.0), (20.0, 20.0, 10.0), (11, 11, 11))
TRUNCATE = OutsidePolicy.TRUNCATE


def stars(count: int, exact: bool = True) -> StarTable:
    """Some of them beyond the box."""
    rng = np.random.default_rng(5)
    distance = rng.uniform(5.0, 200.0, count)
    distances: AbstractDistances = ExactDistances(distance)
    if not exact:
        distances = GaussianDistances(distance, 0.1 * distance)
    return StarTable(
        source_id=np.arange(count),
        l=rng.uniform(0.0, 360.0, count),
        b=np.degrees(np.arcsin(rng.uniform(-1.0, 1.0, count))),
        distances=distances,
        extinction=rng.normal(0.3, 0.1, count),
        extinction_error=rng.uniform(0.01, 0.1, count),
        system=system_named("A_V"),
    )


@pytest.fixture(params=[True, False], ids=["exact", "uncertain"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StarStore:
    with star_store(tmp_path / "stars.zarr") as writer:
        writer.append(stars(500, request.param))
    return open_star_store(tmp_path / "stars.zarr")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.reproduce.beyond_memory._stream.RAYS", 37)


def in_memory(store: StarStore) -> Batch:
    return observe(store.read(), GRID, TRUNCATE).batch


def density() -> torch.Tensor:
    """ρ (M,) > 0 that varies."""
    x, y, z = GRID.points().unbind(-1)
    return 1e-3 * (1.5 + torch.sin(x / 40.0) * torch.cos(y / 30.0 + z / 50.0)).double()


def test_a_lognormal_density(store: StarStore) -> None:
    data, rho = in_memory(store), density()
    rows = interpolation(data.functional, GRID, dtype=torch.float64)
    assert data.noise_variance is not None
    left = data.y - rows.matmul(rho)
    taps = functools.partial(interpolation_taps, grid=GRID, dtype=torch.float64)
    found = stream(store.chunks(130), GRID, TRUNCATE, taps, rho)
    assert found.rays == len(data)
    torch.testing.assert_close(found.force, rows.rmatmul(left / data.noise_variance))
    assert found.misfit == pytest.approx(float((left.square() / data.noise_variance).sum()))


def test_through_beams_the_expansion_is_taken_once(store: StarStore) -> None:
    data, rho, beams = in_memory(store), density(), HealpixBeams(16)
    rows = beamed_interpolation(data.functional, GRID, beams, dtype=torch.float64)
    assert data.noise_variance is not None
    table = BeamTable.of(GRID, beams, dtype=torch.float64)
    expansion = table.expansion()
    found = stream(store.chunks(130), GRID, TRUNCATE, table.taps, expansion.matmul(rho))
    left = data.y - rows.matmul(rho)
    torch.testing.assert_close(
        expansion.rmatmul(found.force), rows.rmatmul(left / data.noise_variance)
    )


def test_a_gaussian_density(store: StarStore) -> None:
    """Φᵀ Σ⁻¹ (y − H β − Φ ε) with the residual variance in Σ."""
    data = in_memory(store)
    prior = GridPrior.padded(Matern32(60.0, 1e-6, dim=3), GRID, dtype=torch.float64)
    features = LocalFeatures(prior, order=2)
    model = GridModel(features, ConstantMean(1e-3), GaussianLikelihood())
    random = torch.Generator().manual_seed(0)
    eps = torch.randn(features.n_features, dtype=torch.float64, generator=random)
    root = prior.torus_root(0.5)

    def residual(part: Batch) -> torch.Tensor:
        return part.y.double() - model.mean.values(part.functional)

    with torch.no_grad():
        phi = features.operator(data.functional)
        expected = phi.rmatmul((residual(data) - phi.matmul(eps)) / model.sigma(data))
        found = stream(
            store.chunks(130),
            GRID,
            TRUNCATE,
            features.taps,
            root.matmul(eps),
            target=residual,
            variance=model.sigma,
        )
        torch.testing.assert_close(root.rmatmul(found.force), expected, rtol=1e-6, atol=1e-6)


def test_float32_taps_agree_to_their_precision(store: StarStore) -> None:
    data, rho = in_memory(store), density()
    taps = functools.partial(interpolation_taps, grid=GRID, dtype=torch.float32)
    rows = interpolation(data.functional, GRID, dtype=torch.float64)
    assert data.noise_variance is not None
    expected = rows.rmatmul((data.y - rows.matmul(rho)) / data.noise_variance)
    found = stream(store.chunks(130), GRID, TRUNCATE, taps, rho).force
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_chunks_that_see_nothing_are_passed_over(tmp_path: Path) -> None:
    """A quarter of the sky is not in the box: in sky order whole chunks see nothing."""
    table = stars(260)
    away = replace(table[:130], l=np.full(130, 180.0), b=np.zeros(130))
    there = replace(table[130:], l=np.zeros(130), b=np.zeros(130))
    with star_store(tmp_path / "stars.zarr") as writer:
        writer.append(away)
        writer.append(there)
    half = RegularGrid((10.0, -50.0, -50.0), (10.0, 10.0, 10.0), (11, 11, 11))

    def taps(rays: LineIntegrals) -> object:
        return interpolation_taps(rays, half, torch.float64)

    store = open_star_store(tmp_path / "stars.zarr")
    rho = torch.full((half.size,), 1e-3, dtype=torch.float64)
    found = stream(store.chunks(130), half, TRUNCATE, taps, rho)  # type: ignore[arg-type]
    assert 0 < found.rays <= 130
    assert math.isfinite(found.misfit)
