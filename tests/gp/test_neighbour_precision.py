"""Nearest neighbours, and the sparse precision that they make."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.gp import NeighbourPrecision
from dustmap.gp._neighbours import nearest, nearest_before
from dustmap.gp.kernels import Matern12, Matern32


def points(n: int, dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 10.0 * torch.rand(n, dim, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("spread", ["even", "far", "cauchy"])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_neighbours_are_the_nearest_however_points_are_spread(dim: int, spread: str) -> None:
    x = points(2000, dim)
    if spread == "far":
        x[0] = 1e6
    elif spread == "cauchy":
        x = (math.pi * (0.1 * x - 0.5)).tan()
    distance = torch.cdist(x[:200], x)
    found = distance.gather(1, nearest(x, x[:200], 10))
    torch.testing.assert_close(found, distance.topk(10, largest=False).values)


def test_fewer_points_than_neighbours() -> None:
    assert nearest(points(2, 2), points(1, 2), 3).tolist() == [[0, 1, -1]]


def test_neighbours_come_before_and_are_different() -> None:
    x = points(500, 2)
    found = nearest_before(x, 8)
    own = torch.arange(500)[:, None]
    assert bool((found < own).all())
    assert bool((found[1:8, 0] >= 0).all())
    assert int(found[0].max()) == -1
    for row in found[8:]:
        real = row[row >= 0].tolist()
        assert len(set(real)) == len(real) > 0


def test_points_on_a_line_in_a_plane_and_repeated_points_are_no_trouble() -> None:
    x = points(300, 2)
    x[:, 1] = 0.0
    x[200:] = x[:100]
    assert bool((nearest_before(x, 5) < torch.arange(300)[:, None]).all())


def test_with_all_neighbours_it_is_the_inverse() -> None:
    x = points(40, 2)
    kernel = Matern32((2.0, 3.0), 1.5, dim=2)
    noise = torch.linspace(0.01, 0.1, 40, dtype=torch.float64)
    found = NeighbourPrecision.of(kernel, x, noise, neighbours=40, dtype=torch.float64)
    K = kernel(x[:, None] - x) + torch.diag(noise)
    assert torch.allclose(found.to_dense(), torch.linalg.inv(K), atol=1e-9)


@pytest.mark.parametrize("noise", [1e-3, 1.0])
def test_it_preconditions(noise: float) -> None:
    x = points(1000, 2)
    kernel = Matern12(8.0, 1.0, dim=2) + Matern12(2.0, 0.5, dim=2)
    P = NeighbourPrecision.of(kernel, x, torch.full((1000,), noise), dtype=torch.float64)
    K = kernel(x[:, None] - x) + noise * torch.eye(1000, dtype=torch.float64)
    L = torch.linalg.cholesky(K)
    eigenvalues = torch.linalg.eigvalsh(L.mT @ P.to_dense() @ L)
    assert float(eigenvalues[-1] / eigenvalues[0]) < 0.1 * float(torch.linalg.cond(K))
    assert float(eigenvalues[0]) > 0.01


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="noise_variance"):
        NeighbourPrecision.of(Matern12(1.0, dim=2), points(5, 2), torch.ones(4))
