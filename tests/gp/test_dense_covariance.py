"""ΦΦᵀ as a matrix against products of Φ."""

import pytest
import torch

from dustmap.gp import GridPrior, RegularGrid, ZeroPoints
from dustmap.gp.features import (
    GroupedFeatures,
    HIPFeatures,
    LocalFeatures,
    _dense_covariance,
    dense_covariance,
    has_dense_covariance,
    in_float64,
)
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    LineIntegrals,
    PointValues,
    Stacked,
)
from dustmap.gp.kernels import Matern32
from tests.combinations import covering


def prior(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> GridPrior:
    grid = RegularGrid.from_bounds((0.0,) * len(shape), (1.0,) * len(shape), shape)
    return GridPrior.padded(Matern32(0.4, 1.3, dim=len(shape)), grid, padding=3.0, dtype=dtype)


def functional(kind: str, dim: int, n: int = 9) -> AbstractFunctional:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(n, dim, generator=generator, dtype=torch.float64)
    if kind == "points":
        return PointValues(x)
    if kind == "rays":
        return LineIntegrals.from_observer(x, observer=torch.full((dim,), 0.5).double())
    direction = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return Derivatives(x, direction / direction.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize(
    ("table", "order", "kind", "shape"),
    covering([0, 2**20], [2, 4], ["points", "rays"], [(12,), (6, 5), (4, 4, 3)], together=2),
)
def test_is_the_product_of_the_rows(
    shape: tuple[int, ...], kind: str, order: int, table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dense_covariance, "DENSE_TABLE", table)
    monkeypatch.setattr(_dense_covariance, "_ENTRIES", 10**6)
    monkeypatch.setattr(_dense_covariance, "_COLUMNS", 5)
    features = LocalFeatures(prior(shape), order=order)
    data = functional(kind, len(shape))
    assert has_dense_covariance(features, data)
    phi = features.operator(data).to_dense()
    torch.testing.assert_close(dense_covariance(features, data), phi @ phi.mT)


@pytest.mark.parametrize("order", [2, 4])
def test_of_a_torus_hardly_wider_than_the_box(order: int) -> None:
    grid = RegularGrid.from_bounds((0.0, 0.0), (1.0, 1.0), (7, 6))
    narrow = GridPrior.padded(Matern32(0.1, 1.0, dim=2), grid, torus_shape=(8, 7))
    features, data = LocalFeatures(narrow, order=order), functional("rays", 2)
    phi = features.operator(data).to_dense()
    torch.testing.assert_close(dense_covariance(features, data), phi @ phi.mT)


@pytest.mark.parametrize("order", [2, 4])
def test_of_data_at_the_corners_of_the_box(order: int) -> None:
    corners = torch.cartesian_prod(*2 * [torch.tensor([0.0, 1.0], dtype=torch.float64)])
    middle = torch.full((2,), 0.5, dtype=torch.float64)
    for data in (PointValues(corners), LineIntegrals.from_observer(corners, observer=middle)):
        features = LocalFeatures(prior((6, 5)), order=order)
        phi = features.operator(data).to_dense()
        torch.testing.assert_close(dense_covariance(features, data), phi @ phi.mT)


def test_features_in_float32_have_the_matrix_of_float64() -> None:
    data = functional("rays", 2)
    few = LocalFeatures(prior((6, 5), torch.float32), memory=0)
    assert in_float64(few).dtype == torch.float64
    expected = dense_covariance(LocalFeatures(prior((6, 5))), data)
    assert torch.equal(dense_covariance(few, data), expected)


def test_groups_have_no_part_in_it() -> None:
    data, field = functional("rays", 1), LocalFeatures(prior((12,)))
    grouped = GroupedFeatures(field, ZeroPoints(2, 0.3))
    assert has_dense_covariance(grouped, data)
    assert torch.equal(dense_covariance(grouped, data), dense_covariance(field, data))


def test_what_it_is_not_for() -> None:
    stacked = Stacked((functional("rays", 1), functional("points", 1)))
    assert not has_dense_covariance(LocalFeatures(prior((12,))), stacked)
    assert not has_dense_covariance(LocalFeatures(prior((12,))), functional("derivatives", 1))
    assert not has_dense_covariance(HIPFeatures(prior((12,))), functional("rays", 1))


@pytest.mark.parametrize("shape", [(9,), (7, 6), (5, 4, 6)])
@pytest.mark.parametrize("cells", [-2.4, -1.1, 0.9, 1.6, 2.4])
def test_data_in_the_padding_are_seen_as_by_the_rows(cells: float, shape: tuple[int, ...]) -> None:
    """Data that are so many cells beyond the faces of all axes, and one within."""
    features = LocalFeatures(prior(shape))
    grid = features.prior.grid
    h, upper = (torch.tensor(v, dtype=torch.float64) for v in (grid.spacing, grid.upper))
    beyond = upper + cells * h if cells > 0 else cells * h
    mixed = torch.where(torch.arange(len(shape)) == len(shape) - 1, beyond, 0.3 * upper)
    data = PointValues(torch.stack([beyond, mixed, 0.4 * upper]))
    phi = features.rows(data).phi
    torch.testing.assert_close(dense_covariance(features, data), phi @ phi.mT, atol=1e-12, rtol=0.0)


def test_data_that_see_no_node_have_no_covariance() -> None:
    features = LocalFeatures(prior((6, 5)))
    nothing = LineIntegrals.segment(torch.ones(2, 2).double(), torch.ones(2, 2).double())
    assert torch.equal(dense_covariance(features, nothing), torch.zeros(2, 2, dtype=torch.float64))
