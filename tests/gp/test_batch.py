"""Batches refuse impossible data, and index like arrays."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.gp._batch import Batch
from dustmap.gp.functionals import Derivatives, PointValues, Stacked


def points(n: int = 5) -> PointValues:
    return PointValues(torch.arange(2.0 * n, dtype=torch.float64).reshape(n, 2))


def ones(n: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.ones(n, dtype=dtype)


def test_length_and_indexing() -> None:
    y = torch.arange(5, dtype=torch.float64)
    batch = Batch(points(), y, 1 + y)
    part = batch[torch.tensor([4, 0])]
    assert len(batch) == 5
    assert len(part) == 2
    assert isinstance(part.functional, PointValues)
    assert torch.equal(part.functional.x, points().x[[4, 0]])
    assert torch.equal(part.y, torch.tensor([4.0, 0.0], dtype=torch.float64))
    assert part.noise_variance is not None
    assert torch.equal(part.noise_variance, torch.tensor([5.0, 1.0], dtype=torch.float64))
    assert Batch(points(), y)[1:3].noise_variance is None
    assert part.response is None
    response = Batch(points(), y, None, 2 * y)[1:3].response
    assert response is not None
    assert torch.equal(response, torch.tensor([2.0, 4.0], dtype=torch.float64))


def test_several_kinds_keep_their_order() -> None:
    x = points(3).x
    functional = Stacked((PointValues(x), Derivatives.partial(x, 0)))
    y = torch.arange(6, dtype=torch.float64)
    index = torch.tensor([5, 1, 3])
    part = Batch(functional, y)[index]
    assert torch.equal(part.y, y[index])
    assert torch.equal(part.functional.moments(), functional.moments()[index])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    y = ones()
    y[3] = bad
    with pytest.raises(ValueError, match=r"y must be finite: 1 of 5.*y\[3\]"):
        Batch(points(), y)
    with pytest.raises(ValueError, match=r"noise_variance must be finite: 1 of 5"):
        Batch(points(), ones(), y)
    with pytest.raises(ValueError, match=r"response must be finite: 1 of 5"):
        Batch(points(), ones(), ones(), y)


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_noise_that_is_not_positive_is_refused(bad: float) -> None:
    noise = ones()
    noise[2] = bad
    with pytest.raises(ValueError, match=r"noise_variance must be positive.*noise_variance\[2\]"):
        Batch(points(), ones(), noise)


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"y must have shape \(5,\).*got \(4,\)"):
        Batch(points(), ones(4))
    with pytest.raises(ValueError, match=r"y must have shape \(5,\).*got \(5, 1\)"):
        Batch(points(), ones()[:, None])
    with pytest.raises(ValueError, match=r"noise_variance must have shape \(5,\)"):
        Batch(points(), ones(), ones(6))


def test_types_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"noise_variance is torch\.float32.*y is torch\.float64"):
        Batch(points(), ones(), ones(dtype=torch.float32))
    with pytest.raises(ValueError, match="float32 or float64"):
        Batch(points(), ones(dtype=torch.int64))
    with pytest.raises(TypeError, match="y must be a torch tensor"):
        Batch(points(), [1.0] * 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="y is on meta, functional on cpu"):
        Batch(points(), torch.ones(5, device="meta"))
