"""Places seen by the nodes around them, beside places seen by all nodes."""

import pytest
import torch

from dustmap.engines._inducing_grid import PlacesAndRays, draws_at_inducing_points
from dustmap.gp import Batch, ConstantMean, GridPrior, RegularGrid
from dustmap.gp.families import FullRankFamily
from dustmap.gp.features import CIQFeatures, HIPFeatures
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern12
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import RowSource, VariationalModel, VariationalPosterior, solve_direct

GRID = RegularGrid((0.0, 0.0, 0.0), (10.0, 10.0, 10.0), (6, 5, 5))
STD, MEAN = 0.002, 0.001


@pytest.fixture(scope="module")
def rays() -> LineIntegrals:
    generator = torch.Generator().manual_seed(0)
    ends = torch.rand(60, 3, generator=generator, dtype=torch.float64)
    ends = ends * torch.tensor(GRID.upper, dtype=torch.float64)
    return LineIntegrals.from_observer(ends)


def posterior_of(features: HIPFeatures | CIQFeatures, rays: LineIntegrals) -> VariationalPosterior:
    generator = torch.Generator().manual_seed(1)
    family = FullRankFamily(features.n_features)
    model = VariationalModel(features, ConstantMean(MEAN), GaussianLikelihood(), family)
    y = 0.06 + 0.03 * torch.randn(len(rays), generator=generator, dtype=torch.float64)
    batch = Batch(rays, y, torch.full_like(y, 0.01**2))
    found = solve_direct(model, batch, RowSource(features, rays))
    return VariationalPosterior(model, found.state)


@pytest.fixture(scope="module")
def everywhere(rays: LineIntegrals) -> VariationalPosterior:
    """The posterior of 60 rays whose features take all nodes, by PCG."""
    prior = GridPrior.padded(Matern12(25.0, STD**2, dim=3), GRID, padding=0.5)
    return posterior_of(HIPFeatures(prior, rtol=1e-6, dense_below=0), rays)


@pytest.mark.slow
def test_places_by_their_neighbours_are_places_by_all_nodes(
    everywhere: VariationalPosterior, rays: LineIntegrals
) -> None:
    both = PlacesAndRays.of(everywhere)
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(30, 3, generator=generator, dtype=torch.float64)
    places = PointValues(x * torch.tensor(GRID.upper, dtype=torch.float64))
    found, expected = both.predict(places), everywhere.predict(places)
    assert float((found.mean - expected.mean).abs().max()) < 0.05 * STD
    torch.testing.assert_close(found.std, expected.std, rtol=0.02, atol=0.0)
    few = rays[:4]
    same, rows = both.predict(few), everywhere.predict(few)
    torch.testing.assert_close(same.mean, rows.mean)
    torch.testing.assert_close(same.variance, rows.variance)


@pytest.mark.parametrize("whitening", ["hip", "ciq"])
def test_draws_at_inducing_points_have_the_posteriors_moments(
    everywhere: VariationalPosterior, rays: LineIntegrals, whitening: str
) -> None:
    posterior = everywhere
    if whitening == "ciq":
        posterior = posterior_of(CIQFeatures(Matern12(25.0, STD**2, dim=3), GRID), rays)
    draws = draws_at_inducing_points(posterior, 400, seed=3).predict(PointValues(GRID.points()))
    expected = posterior.predict(PointValues(GRID.points()))
    standardised = (draws.mean - expected.mean) / (expected.std / 20.0)
    assert float(standardised.abs().max()) < 5.0
    torch.testing.assert_close(draws.std, expected.std, rtol=0.2, atol=0.0)


def test_few_nodes_stay_as_they_are(everywhere: VariationalPosterior) -> None:
    features = HIPFeatures(GridPrior.padded(Matern12(25.0, STD**2, dim=3), GRID, padding=0.5))
    model = VariationalModel(
        features, ConstantMean(MEAN), GaussianLikelihood(), everywhere.model.family
    )
    dense = VariationalPosterior(model, everywhere.state)
    assert PlacesAndRays.of(dense) is dense
