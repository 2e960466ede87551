"""Fields: the fast interpolation equals the posterior's own predictions, whatever the slabs."""

import numpy as np
import pytest
import torch

from dustmap.gp import ConstantMean, ExactGP, RegularGrid
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern32
from dustmap.sky.maps import (
    AbstractDensityField,
    MapRequest,
    OwnNodes,
    PosteriorField,
    Quantity,
)
from tests.sky.maps.fields import (
    A_V,
    FINE,
    NODES,
    PRIOR_STD,
    cube,
    node_field,
    positions,
    posterior,
    posterior_field,
    relative_error,
)

ALL = MapRequest(tuple(Quantity), samples=4)
NO_COVERAGE = MapRequest(tuple(q for q in Quantity if q is not Quantity.COVERAGE), samples=4)


def whole(
    field: AbstractDensityField, grid: RegularGrid, request: MapRequest, depth: int
) -> dict[str, np.ndarray]:
    """All slabs joined, checked to follow one another."""
    slabs = list(field.planes(grid, request, depth))
    assert [slab.start for slab in slabs] == [0, *(slab.stop for slab in slabs[:-1])]
    assert slabs[-1].stop == grid.shape[2]
    return {
        q.value: np.concatenate([slab.arrays[q.value] for slab in slabs], axis=-3)
        for q in request.quantities
    }


@pytest.mark.parametrize("grid", [NODES, FINE], ids=["nodes", "fine"])
def test_planes_are_what_the_posterior_predicts(grid: RegularGrid) -> None:
    found = whole(node_field(), grid, ALL, depth=3)
    law, points = posterior(), PointValues(grid.points())
    predicted = law.predict(points)
    percentiles = law.percentiles(points, torch.tensor([0.16, 0.5, 0.84], dtype=torch.float64))
    wanted = {
        "mean": predicted.mean,
        "std": predicted.std,
        "p16": percentiles[0],
        "median": percentiles[1],
        "p84": percentiles[2],
        "samples": law.sample(points, 4, torch.Generator()),
    }
    for name, values in wanted.items():
        assert relative_error(found[name], cube(values, grid)) < 2e-6, name
    assert (found["p16"] > 0).all()
    assert (found["p16"] <= found["median"]).all()
    assert (found["median"] <= found["p84"]).all()


def test_coverage_is_that_of_the_nodes() -> None:
    found = whole(node_field(), NODES, MapRequest((Quantity.COVERAGE,)), depth=2)["coverage"]
    variance = posterior().node_log_moments()[1].square()
    wanted = (1 - cube(variance, NODES) / PRIOR_STD**2).clip(0, 1)
    np.testing.assert_allclose(found, wanted, atol=2e-7)
    assert 0.2 < found.mean() < 0.9


@pytest.mark.parametrize("make", [node_field, posterior_field])
def test_slabs_do_not_change_values(make: "type[AbstractDensityField]") -> None:
    one, many = (whole(make(), FINE, ALL, depth) for depth in (1, 9))
    for name in one:
        np.testing.assert_array_equal(one[name], many[name], err_msg=name)


@pytest.mark.parametrize("name", [q.value for q in Quantity if q is not Quantity.COVERAGE])
def test_both_kinds_of_field_agree(name: str) -> None:
    request = MapRequest.named([name], 4)
    points = PointValues(torch.from_numpy(positions(50)))
    rays = LineIntegrals.from_observer(torch.from_numpy(positions(50, seed=1)))
    for functional in (points, rays):
        fast = node_field().evaluate(functional, request)[name]
        slow = posterior_field().evaluate(functional, request)[name]
        np.testing.assert_allclose(fast, slow, rtol=1e-5)
    on_grid = [whole(field(), FINE, request, 2)[name] for field in (node_field, posterior_field)]
    np.testing.assert_allclose(on_grid[0], on_grid[1], rtol=1e-5)


def test_evaluate_agrees_with_planes() -> None:
    found = node_field().evaluate(PointValues(FINE.points()), ALL)
    planes = whole(node_field(), FINE, ALL, depth=4)
    for name in found:
        wanted = cube(torch.from_numpy(found[name]), FINE)
        np.testing.assert_allclose(planes[name], wanted, rtol=3e-6, err_msg=name)


def test_what_cannot_be_asked_is_refused() -> None:
    field = node_field(samples=2)
    with pytest.raises(ValueError, match="7 samples were asked for and this density has 2"):
        list(field.planes(NODES, MapRequest((Quantity.SAMPLES,), 7)))
    beyond = RegularGrid((-50.0, -60.0, -10.0), (10.0, 20.0, 5.0), (9, 7, 5))
    with pytest.raises(ValueError, match="grid along X: expected -40 to 40 pc"):
        list(field.planes(beyond, MapRequest((Quantity.MEAN,))))
    rays = LineIntegrals.from_observer(torch.from_numpy(positions(2)))
    with pytest.raises(ValueError, match="coverage: expected places"):
        field.evaluate(rays, ALL if field.n_samples > 4 else MapRequest((Quantity.COVERAGE,)))
    with pytest.raises(ValueError, match="expected one of mean, std, median"):
        MapRequest.named(["mean", "sdt"])
    with pytest.raises(ValueError, match="each once"):
        MapRequest((Quantity.MEAN, Quantity.MEAN))
    with pytest.raises(ValueError, match="more than 0 if the quantities have samples, else 0"):
        MapRequest((Quantity.SAMPLES,))


def gaussian_field(with_nodes: bool) -> PosteriorField:
    """The exact posterior of 30 densities, some of which are negative."""
    generator = torch.Generator().manual_seed(2)
    x = torch.from_numpy(positions(30))
    y = torch.randn(30, dtype=torch.float64, generator=generator)
    gp = ExactGP(Matern32(25.0, 1.3**2, dim=3), ConstantMean(0.1))
    law = gp.condition(PointValues(x), y, torch.full((30,), 0.01).double())
    own = OwnNodes(NODES, lambda: law.predict(PointValues(NODES.points()))) if with_nodes else None
    (a, b, c), (d, e, f) = NODES.lower, NODES.upper
    return PosteriorField(law, A_V, (a, b, c), (d, e, f), 1.3, own=own)


def test_a_gaussian_density_may_be_negative() -> None:
    request = MapRequest(tuple(q for q in Quantity if q is not Quantity.SAMPLES))
    field = gaussian_field(with_nodes=False)
    assert not field.positive
    found = whole(field, NODES, request, depth=2)
    assert found["mean"].min() < 0
    np.testing.assert_allclose(found["median"], found["mean"], atol=1e-6)
    np.testing.assert_allclose(found["p84"] - found["mean"], 0.99446 * found["std"], rtol=1e-4)
    np.testing.assert_allclose(found["coverage"], 1 - (found["std"] / 1.3) ** 2, atol=1e-5)
    own = whole(gaussian_field(with_nodes=True), NODES, request, depth=3)
    for name in found:
        np.testing.assert_allclose(own[name], found[name], atol=1e-6)
    with pytest.raises(ValueError, match="this density has none: leave"):
        list(field.planes(NODES, MapRequest((Quantity.SAMPLES,), 1)))
