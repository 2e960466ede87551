"""The regular grid: coordinates, order, and refusals."""

import pytest
import torch

from dustmap.gp import RegularGrid


def test_axes_points_and_c_order() -> None:
    grid = RegularGrid((0.0, -1.0), (0.5, 2.0), (3, 2))
    assert grid.dim == 2
    assert grid.size == 6
    assert grid.upper == (1.0, 1.0)
    expected = [[0, -1], [0, 1], [0.5, -1], [0.5, 1], [1, -1], [1, 1]]
    assert torch.equal(grid.points(), torch.tensor(expected, dtype=torch.float64))
    assert grid.points(torch.float32).dtype == torch.float32
    assert [a.dtype for a in grid.axes()] == [torch.float64, torch.float64]


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_from_bounds_reaches_both_faces(dim: int) -> None:
    grid = RegularGrid.from_bounds([-0.3] * dim, [0.7] * dim, range(4, 4 + dim))
    assert grid.lower == (-0.3,) * dim
    assert grid.upper == pytest.approx((0.7,) * dim)
    assert grid.shape == tuple(range(4, 4 + dim))


def test_contains_faces_but_not_beyond() -> None:
    grid = RegularGrid.from_bounds((0, 0), (0.3, 1), (4, 3))
    x = torch.tensor([[0.0, 0.0], [0.3, 1.0], [0.1 + 0.2, 0.5], [0.31, 0.5], [0.1, -0.01]])
    assert grid.contains(x.double()).tolist() == [True, True, True, False, False]


def test_grids_compare_by_value() -> None:
    assert RegularGrid((0.0,), (1.0,), (4,)) == RegularGrid((0.0,), (1.0,), (4,))


@pytest.mark.parametrize(
    ("lower", "spacing", "shape", "message"),
    [
        ((0.0,), (1.0,), (1,), "two points on every axis"),
        ((), (), (), "two points on every axis"),
        ((0.0, 0.0), (1.0,), (4,), "one entry per axis"),
        ((0.0,), (0.0,), (4,), "spacing must be positive"),
        ((0.0,), (float("nan"),), (4,), "spacing must be positive"),
        ((float("inf"),), (1.0,), (4,), "lower must be finite"),
    ],
)
def test_bad_grids_are_refused(
    lower: tuple[float, ...], spacing: tuple[float, ...], shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RegularGrid(lower, spacing, shape)


def test_from_bounds_refuses_ragged_and_reversed_bounds() -> None:
    with pytest.raises(ValueError, match="one entry per axis"):
        RegularGrid.from_bounds((0,), (1, 1), (3, 3))
    with pytest.raises(ValueError, match="upper > lower"):
        RegularGrid.from_bounds((1,), (0,), (3,))
    with pytest.raises(ValueError, match="two points"):
        RegularGrid.from_bounds((0,), (1,), (1,))


def test_contains_refuses_another_dimension() -> None:
    with pytest.raises(ValueError, match="2 columns"):
        RegularGrid.from_bounds((0, 0), (1, 1), (3, 3)).contains(torch.zeros(4, 3))
